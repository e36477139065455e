"""Copies of slots over TCP, from memory to memory."""
