"""How an agent becomes one of the job's, and how it leaves with a last sentence."""
