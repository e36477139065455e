"""Live tensors: filled in place, taken apart, checked for NaN."""
