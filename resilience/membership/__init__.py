"""Which nodes train, in which node rank, and which node holds whose snapshots. Pure."""
