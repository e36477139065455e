"""The warm process: imports ahead of time, and forks launchers and ranks."""
