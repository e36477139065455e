"""What a rank does between two steps: metrics, consensus of all ranks, lineage."""
