"""Optimizers as sources of state: groups, nested ones, shards, accumulated gradients."""
