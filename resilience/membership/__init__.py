"""Which nodes train, in which node rank, and who holds whose copies. Pure."""
