"""What an agent watches while ranks train: progress, hangs, step times, memory, devices."""
