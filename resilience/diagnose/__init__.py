"""Suspicions → the root cause, and what speaks against the other causes. Pure."""
