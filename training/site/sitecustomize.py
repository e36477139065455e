"""Attaches each rank of `mt-resilient run`. This file is first on a rank's PYTHONPATH, so it first runs the sitecustomize that it hides.

Below `mt-resilient run -- SCRIPT`, it hands each torchrun to an agent (`agent/launch/handover.py`).

Python imports this file before any code of the user. This file must never keep a rank from starting. Any Python that the user starts may
import it, even Python 2.7. So this file uses no syntax and no module that is newer than 2.7.
"""

import os
import sys


def _chain():
    """Run the next sitecustomize after our own folder on sys.path, as Python would have."""
    here = os.path.dirname(os.path.abspath(__file__))
    places = [os.path.abspath(entry) for entry in sys.path]
    behind = sys.path[len(places) - places[::-1].index(here) :] if here in places else []
    try:
        from importlib.machinery import PathFinder
        from importlib.util import module_from_spec
    except ImportError:  # Python 2, which ignores an ImportError of a sitecustomize
        import imp

        imp.load_module("sitecustomize", *imp.find_module("sitecustomize", behind))  # type: ignore[arg-type]
        return
    spec = PathFinder.find_spec("sitecustomize", behind)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _is_torchrun(words):
    """Whether this Python runs torchrun's file or module."""
    at = 1
    while at < len(words) and words[at][:1] == "-" and words[at] != "-":
        word = words[at]
        letter = next((each for each in word[1:] if each in "mcWX"), "") if word[:2] != "--" else ""
        if letter == "m":
            module = word.partition("m")[2] or words[at + 1]
            return module in ("torch.distributed.run", "torch.distributed.launch")
        if letter == "c":
            return False
        at += 2 if word[-1] in "WX" or word == "--check-hash-based-pycs" else 1
    return at < len(words) and os.path.basename(words[at]) == "torchrun" and os.path.isfile(words[at])


def _is_a_rank():
    """Whether torchrun itself started this process. torchrun gives each rank its own session, and variables that torchrun does not have."""
    if os.getsid(0) != os.getpid():
        return False
    try:
        with open("/proc/{}/environ".format(os.getppid()), "rb") as file:  # noqa: UP032
            return b"TORCHELASTIC_RUN_ID=" not in file.read()
    except EnvironmentError:  # noqa: UP024
        return True


try:
    _words = getattr(sys, "orig_argv", [])  # from 3.10 on
    if "MT_RESILIENT_WRAPS" in os.environ and _is_torchrun(_words):
        import subprocess

        _python = os.environ["MT_RESILIENT_PYTHON"]
        _package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        _handover = os.path.join(_package, "agent", "launch", "handover.py")
        if subprocess.call([_python, "-P", "-c", "import mt_resilient"], stderr=subprocess.DEVNULL) == 0:
            os.execv(_python, [_python, "-I", "-S", _handover] + _words)  # noqa: RUF005
        _said = "mt-resilient: {} lacks the package mt_resilient here. This torchrun runs without mt-resilient\n"
        sys.stderr.write(_said.format(_python))
except Exception:  # then the torchrun runs without an agent
    pass
if "MT_RESILIENT_WARM" in os.environ:
    try:
        from mt_resilient.training.warm import forkserver

        forkserver.serve(_chain)
    except BaseException:  # otherwise Python would run the script, but this process is not a rank
        import traceback

        traceback.print_exc()
        os._exit(1)
else:
    _chain()
if "MT_RESILIENT_HANDOFF" in os.environ:
    try:
        from mt_resilient.training.attach import import_hook

        if "TORCHELASTIC_RUN_ID" in os.environ:  # RANK would not do: an operator may set it for the launcher too
            import_hook.activate()
        else:
            import_hook.listen_to_launcher()
    except Exception as error:
        if os.environ.get("LOCAL_RANK") == "0" and _is_a_rank():  # the rank's child processes may be any programs
            _said = "mt-resilient: this rank's Python cannot be attached ({}); it runs unwatched\n"
            sys.stderr.write(_said.format(error))
