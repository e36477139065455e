"""A loop's batches, and its place in them as a part of the state."""
