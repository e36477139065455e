"""State in the script's own variables, beside the Session: kept, or named in the log if no snapshot holds it."""
