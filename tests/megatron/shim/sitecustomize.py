"""Puts the nemesis into every Python process of a launch: PYTHONPATH=<this directory>, MCORE_CPU_SHIM=1. On a machine without
NVIDIA's driver, also the CPU shim. With BRIDGE_STAND_INS=1, also the stand-ins that Megatron-Bridge needs.

Nothing is imported or patched before torch is, so processes that never import torch pay nothing; and nothing depends on RANK, since a
rank may be forked from a process that imported torch before there was one. At the end the next sitecustomize.py on the path runs.
"""

import importlib.machinery
import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


EXAMPLE = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(HERE))), "examples", "gpt")


def load(name, directory):
    """Import a file by its place: neither folder is to come onto the path of the launch."""
    spec = importlib.util.spec_from_file_location(name, os.path.join(directory, f"{name}.py"))
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def install_shim():
    imports = load("after_import", EXAMPLE)
    load("nemesis", HERE)
    load("cpu_shim_megatron", EXAMPLE)  # what is missing without Transformer Engine is missing on a GPU too
    if not os.path.exists("/dev/nvidiactl"):
        shim = load("cpu_shim", EXAMPLE)
        load("cpu_shim_gloo", EXAMPLE)
        imports.after_import("torch")(lambda torch: shim.install())
    imports.watch()


def run_next():
    """Run the sitecustomize.py that this one hides: the first *behind* us, so that several chaining ones end."""
    path = [os.path.abspath(entry or os.curdir) for entry in sys.path]
    behind = path[len(path) - path[::-1].index(HERE) :] if HERE in path else []
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", behind)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("MCORE_CPU_SHIM") == "1":
    install_shim()
if os.environ.get("BRIDGE_STAND_INS") == "1":
    load("bridge_boot", HERE).install()
run_next()
