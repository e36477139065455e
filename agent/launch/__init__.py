"""Parses the wrapped torchrun command and the scheduler's environment, checks interpreters, and finds ports."""
