"""Derives the incident of each fault from the World (all that the leader knows). Pure."""
