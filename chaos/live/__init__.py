"""The job under test: started, looked at, and ended."""
