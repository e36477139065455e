"""The story of each fault, derived from the picture of the job. Pure."""
