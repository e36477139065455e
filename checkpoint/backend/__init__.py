"""Where snapshots lie: a directory or a prefix in an object store, and names below it."""
