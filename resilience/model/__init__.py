"""The job's data types: signals, records, and one immutable picture of the whole job. Pure."""
