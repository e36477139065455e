"""What is simulated: cluster, costs, faults, and their models."""
