"""What people and Prometheus get to see: explain, status, journal, metrics."""
