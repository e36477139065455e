"""Where snapshots are stored: a directory or a prefix in an object store, and the names in it."""
