"""Data types, decisions, and the control plane. The package `resilience` imports none of our other packages."""
