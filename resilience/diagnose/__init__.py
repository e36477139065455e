"""From suspicions to the root cause, and to what speaks against the other causes. Pure."""
