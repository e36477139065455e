"""Plants a bug into each process of the run with faults, at its start (`scripts/planted-bugs`). The sitecustomize of `chaos/site` runs this
one, because this folder comes later on PYTHONPATH."""

import os

if "PLANTED_BUG" in os.environ and "MT_RESILIENT_CHAOS" in os.environ:
    import planted_bugs

    planted_bugs.plant(os.environ["PLANTED_BUG"])
