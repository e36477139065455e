"""What an agent prints and journals, without waiting for any reader."""
