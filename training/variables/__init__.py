"""What the script has in variables of its own, beside the Session: kept, or named where no snapshot holds it."""
