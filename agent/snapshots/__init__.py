"""The snapshots that a node holds in memory and on disk, which of them are to be trusted, and the drain process."""
