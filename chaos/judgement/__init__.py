"""What is injected, what must hold, and what the result says. Pure."""
