"""The snapshots that a node holds in memory and on disk, which of them are safe to resume from, and the drain process."""
