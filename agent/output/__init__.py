"""Prints and journals an agent's events without waiting for any reader."""
