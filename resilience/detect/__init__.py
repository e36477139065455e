"""From the World (all that the leader knows) to suspicions, by one rule for each kind of fault. Pure."""
