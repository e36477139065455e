"""What an agent and the processes that it starts share: board pages, handoff, shared memory, descriptors."""
