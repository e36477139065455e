"""One simulated run: faults strike, the real controller decides, agents obey."""
