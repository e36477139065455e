"""The script's own values: packed into a snapshot, and back into live objects."""
