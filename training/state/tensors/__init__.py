"""Live tensors: filled in place, split into parts, checked for NaN."""
