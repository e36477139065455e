"""A rank's snapshots: copied into shared memory, and restored."""
