"""Decides what the leader writes next, from the World, the time and the policy. Pure."""
