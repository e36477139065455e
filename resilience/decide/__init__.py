"""(World, now, policy) → what the leader writes next. Pure."""
