"""How an agent joins the job, and how it exits with a final message."""
