"""The faults, one function each, and what injects them at their moment."""
