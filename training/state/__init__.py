"""The training state of a rank: saved objects, positions in global tensors, random number generators."""
