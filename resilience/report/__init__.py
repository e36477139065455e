"""What people and Prometheus see: explain, status, journal, metrics."""
