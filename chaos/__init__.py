"""`mt-resilient chaos`: injects faults into a training for real, and checks that nothing is lost."""
