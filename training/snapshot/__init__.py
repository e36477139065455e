"""Snapshots of a rank: taken into the arena, and restored."""
