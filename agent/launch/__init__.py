"""The wrapped command, the scheduler's environment, interpreters and ports."""
