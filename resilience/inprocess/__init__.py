"""Rules that every rank applies in the same way at a step boundary (the moment between two steps). Pure."""
