"""Writes an agent's events to the terminal and the journal, without waiting for any reader."""
