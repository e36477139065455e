"""What code takes from one step, or call, to the next: read from its byte code, which is never run."""
