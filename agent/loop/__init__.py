"""The agent's loop: observe, publish, decide, obey."""
