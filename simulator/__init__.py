"""A simulated cluster under the real controller: how much time a training on thousands of nodes would lose, and to which faults."""
