"""Snapshots on durable storage: saved, committed, listed, deleted, loaded."""
