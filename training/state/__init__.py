"""What the training state of a rank is: sources, places in global tensors, generators of random numbers."""
