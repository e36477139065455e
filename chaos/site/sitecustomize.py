"""Puts the injector of `mt-resilient chaos` into each rank, before the script. This file then runs the sitecustomize that it hides.

Only `mt-resilient chaos` puts this folder on PYTHONPATH, behind that of `mt-resilient run`, whose own sitecustomize runs this one. This
file must never keep a process from starting.
"""

import os
import sys


def _chain():
    """Run the next sitecustomize after our own folder on sys.path, as Python would have."""
    here = os.path.dirname(os.path.abspath(__file__))
    places = [os.path.abspath(entry) for entry in sys.path]
    behind = sys.path[len(places) - places[::-1].index(here) :] if here in places else []
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", behind)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if "MT_RESILIENT_CHAOS" in os.environ:
    try:
        from mt_resilient.chaos.rank import injector

        injector.install()
    except Exception:
        import traceback

        traceback.print_exc()
_chain()
