"""A snapshot's life: staged in the arena, sealed, drained, committed, found again, restored."""
