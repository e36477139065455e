"""Makes sentences from typed objects, and numbers for people. No program parses them."""
