"""Root cause → the cheapest recovery that can help, and the state to resume from. Pure."""
