"""Words, judgement and control plane. Imports none of the other packages."""
