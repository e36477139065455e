"""Finds the variables that code carries from one step or call to the next, by reading its byte code."""
