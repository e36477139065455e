"""Data types, decisions, control plane. It imports none of the other packages."""
