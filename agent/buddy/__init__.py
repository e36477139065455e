"""Copies of snapshots in another node's memory: the agent's part and the drain process's part."""
