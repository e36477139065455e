"""Leases, fencing, and the connection to the next agent."""
