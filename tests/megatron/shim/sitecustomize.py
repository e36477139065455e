"""Puts the CPU shim and the nemesis into every Python process of a launch: PYTHONPATH=<this directory>, MCORE_CPU_SHIM=1.

Nothing is imported or patched before torch is, so processes that never import torch pay nothing; and nothing depends on RANK, since a
rank may be forked from a process that imported torch before there was one. At the end the next sitecustomize.py on the path runs.
"""

import importlib.machinery
import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def install() -> None:
    examples = os.path.join(HERE, *[os.pardir] * 3, "examples", "gpt")
    for directory, name in ((examples, "cpu_shim"), (examples, "cpu_shim_megatron"), (HERE, "nemesis")):
        spec = importlib.util.spec_from_file_location(name, os.path.join(os.path.abspath(directory), f"{name}.py"))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    shim = sys.modules["cpu_shim"]
    shim.after_import("torch")(lambda torch: shim.install())
    shim.watch_imports()


def run_next() -> None:
    """Run the sitecustomize.py that this one hides: the first *behind* us, so that several chaining ones end."""
    path = [os.path.abspath(entry or os.curdir) for entry in sys.path]
    behind = path[len(path) - path[::-1].index(HERE) :] if HERE in path else []
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", behind)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("MCORE_CPU_SHIM") == "1":
    install()
run_next()
