"""The shared memory that snapshots live in: slots, their headers, staging."""
