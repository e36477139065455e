"""Suspicions → the root cause, and what speaks against the others. Pure."""
