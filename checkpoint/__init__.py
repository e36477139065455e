"""A snapshot's life: staged in shared memory, sealed, drained to disk, committed, listed, restored."""
