"""The part of chaos that runs inside a rank."""
