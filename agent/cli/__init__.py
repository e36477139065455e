"""Commands that show a job, or send it an order, from another terminal."""
