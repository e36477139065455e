"""A cluster that is not there, governed by the real judgement: what a training on thousands of nodes would lose to faults, and to what."""
