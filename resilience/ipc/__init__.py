"""Between an agent and the processes that it starts: board pages, handoff, shared memory, descriptors."""
