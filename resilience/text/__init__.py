"""Typed things → sentences, and numbers as people read them. Nobody parses them."""
