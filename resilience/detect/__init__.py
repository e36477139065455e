"""World → suspicions: one rule for each kind of fault. Pure."""
