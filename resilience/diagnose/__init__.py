"""From suspicions to the root cause, and to the evidence against the other causes. Pure."""
