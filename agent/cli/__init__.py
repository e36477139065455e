"""Commands that look at a job, or order something, from another terminal."""
