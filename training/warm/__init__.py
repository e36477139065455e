"""The warm process: runs imports ahead of time, and forks launchers and ranks."""
