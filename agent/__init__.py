"""The agent, one per node: starts the ranks, watches them, ends them, and obeys the generation record. Imports no torch."""
