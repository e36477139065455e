"""The words of the job: types, signals, records, and one immutable picture of all of it. Pure."""
