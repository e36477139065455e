"""From the root cause to the cheapest recovery that can help, and to the state to resume from. Pure."""
