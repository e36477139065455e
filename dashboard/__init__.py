"""`mt-resilient dashboard`: a web page about jobs, drawn from their journals. Its libraries are the extra `dashboard`."""
