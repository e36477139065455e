"""Commands that show a job, or give it an order, from another terminal."""
