"""Copies of slots over TCP, from node to node."""
