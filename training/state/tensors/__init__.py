"""Live tensors: filled in place, taken apart, looked at for NaN."""
