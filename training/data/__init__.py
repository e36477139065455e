"""A loop's batches, and its position in them as a part of the state."""
