"""The script's own values: packed into a snapshot, and unpacked into live objects."""
