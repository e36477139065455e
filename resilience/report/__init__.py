"""The output for people and Prometheus: explain, status, journal, metrics."""
