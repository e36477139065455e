"""The shared memory that contains snapshots: slots, their headers, staging."""
