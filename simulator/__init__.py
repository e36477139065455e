"""Simulates a cluster under the real controller, and shows how much time a training on thousands of nodes would lose to which faults."""
