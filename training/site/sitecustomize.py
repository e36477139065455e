"""Attaches each rank of `mt-resilient run`, where it is first on PYTHONPATH. Before that, it runs the sitecustomize that it hides.

Below `mt-resilient run -- SCRIPT`, it hands each torchrun to an agent (`agent/launch/handover.py`).

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


def _is_torchrun(words: list[str]) -> bool:
    """Whether this Python runs torchrun's file or module."""
    at = 1
    while at < len(words) and words[at][:1] == "-":
        word = words[at]
        letter = next((each for each in word[1:] if each in "mcWX"), "") if word[:2] != "--" else ""
        if letter == "m":
            module = word.partition("m")[2] or words[at + 1]
            return module in ("torch.distributed.run", "torch.distributed.launch")
        if letter == "c":
            return False
        at += 2 if word[-1] in "WX" or word == "--check-hash-based-pycs" else 1
    return at < len(words) and os.path.basename(words[at]) == "torchrun"


if "MT_RESILIENT_WRAPS" in os.environ and _is_torchrun(sys.orig_argv):
    import json

    _python = os.environ["MT_RESILIENT_PYTHON"]
    _handover = json.loads(os.environ["MT_RESILIENT_WRAPS"])["handover"]
    os.execv(_python, [_python, "-I", "-S", _handover, *sys.orig_argv])
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
