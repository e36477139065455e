"""Rules that all ranks apply alike at a step boundary. Pure."""
