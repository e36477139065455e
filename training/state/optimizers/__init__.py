"""Optimizers as saved objects: groups, nested optimizers, shards, accumulated gradients."""
