"""The agent, one process per node: starts, watches and ends the ranks, and obeys the generation record. It does not import torch."""
