"""One simulated run: faults strike, the real judgement decides, agents obey."""
