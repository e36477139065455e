"""Finds what code carries from one step or call to the next, by reading its byte code, which is never run."""
