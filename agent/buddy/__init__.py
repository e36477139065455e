"""Copies of snapshots in another node's memory, as agent and drain process exchange them."""
