"""Typed things → sentences, and numbers as people read them. No program parses them."""
