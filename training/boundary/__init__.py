"""What a rank does between two steps: figures, consensus of all ranks, lineage."""
