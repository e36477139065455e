"""The incident of each fault, derived from the World. Pure."""
