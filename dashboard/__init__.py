"""`mt-resilient dashboard`: a web page about jobs, drawn from their journals. The page's libraries are the package's extra `dashboard`."""
