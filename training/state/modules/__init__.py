"""Modules as a source of state: tensors, extra state, attributes, structure."""
