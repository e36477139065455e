"""State in the script's own variables, outside the Session: saved, or named in the log if no snapshot contains it."""
