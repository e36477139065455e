"""Attaches a rank to its agent: import hook, the rank's page of the board, signal that requests stacks."""
