"""How an agent joins the job, and how it leaves with a last sentence."""
