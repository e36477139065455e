"""Faults and pace from outside, for scripts that know nothing of it: PYTHONPATH=<this directory>, on top of the ranks' own Python path.

    GATE=FILE GATE_AFTER=N   after N backward passes of a process the next one waits until FILE is there
    PACE_S=0.05              so long each backward pass sleeps
    POISON=FILE              once FILE is there, rank 1 renames it, and its next loss and all gradients of it are NaN

What is patched is torch.Tensor.backward, which every loop comes through. The environment is read when it runs: a rank may be forked from a
process that was started without it. At the end the next sitecustomize.py on the path runs.
"""

import importlib.machinery
import importlib.util
import os
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
EXAMPLE = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(HERE))), "examples", "gpt")

passes = 0


def torch_imported(torch):
    original = torch.Tensor.backward

    def backward(self, gradient=None, *args, **kwargs):
        global passes
        passes += 1
        time.sleep(float(os.environ.get("PACE_S", 0)))
        while passes > int(os.environ.get("GATE_AFTER", sys.maxsize)) and not os.path.exists(os.environ["GATE"]):
            time.sleep(0.02)
        if os.environ.get("RANK") == "1" and taken(os.environ.get("POISON", "")):
            self.data.fill_(torch.nan)
            gradient = torch.full_like(self, torch.nan)
        return original(self, gradient, *args, **kwargs)

    torch.Tensor.backward = backward


def taken(poison):
    try:
        os.rename(poison, poison + ".taken")
    except OSError:
        return False
    return True


def load(name, directory):
    """Import a file by its place: its folder is not to come onto the path of the launch."""
    spec = importlib.util.spec_from_file_location(name, os.path.join(directory, f"{name}.py"))
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def run_next():
    """Run the sitecustomize.py that this one hides: the first *behind* us, so that several chaining ones end."""
    path = [os.path.abspath(entry or os.curdir) for entry in sys.path]
    behind = path[len(path) - path[::-1].index(HERE) :] if HERE in path else []
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", behind)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


imports = load("after_import", EXAMPLE)
imports.after_import("torch")(torch_imported)
imports.watch()
run_next()
