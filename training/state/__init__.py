"""The training state of a rank: sources, places in global tensors, generators of random numbers."""
