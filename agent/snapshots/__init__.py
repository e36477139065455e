"""What a node holds of the training in memory and on disk, what of that is to be trusted, and the drain process."""
