"""Checks of a node before it joins."""
