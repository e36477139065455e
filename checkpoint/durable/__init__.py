"""Snapshots on durable storage: saved, committed, listed, retired, loaded."""
