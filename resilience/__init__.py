"""Data types, decisions, and the control plane. It imports none of our other packages."""
