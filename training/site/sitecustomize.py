"""Attaches each rank of `mt-resilient run`, where it is first on PYTHONPATH. Before that, it runs the sitecustomize that it hides.

Python imports it before anything of the user's. It must never keep a rank from starting.
"""

import importlib.machinery
import importlib.util
import os
import sys


def _chain() -> None:
    """Run the next sitecustomize after our own folder on sys.path, as Python would have."""
    here = os.path.dirname(os.path.abspath(__file__))
    places = [os.path.abspath(entry) for entry in sys.path]
    behind = sys.path[len(places) - places[::-1].index(here) :] if here in places else []
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", behind)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if "MT_RESILIENT_WARM" in os.environ:
    try:
        from mt_resilient.training.warm import forkserver

        forkserver.serve(_chain)
    except BaseException:  # Python would go on and run the script, but this process is no rank
        import traceback

        traceback.print_exc()
        os._exit(1)
else:
    _chain()
if "MT_RESILIENT_HANDOFF" in os.environ:
    try:
        from mt_resilient.training.attach import import_hook

        if "TORCHELASTIC_RUN_ID" in os.environ:  # the launcher may have a RANK too, from an operator
            import_hook.activate()
        else:
            import_hook.listen_to_launcher()
    except Exception as error:
        if os.environ.get("LOCAL_RANK") == "0":
            print(f"mt-resilient: this rank's Python cannot be attached ({error}); it runs unwatched", file=sys.stderr)
