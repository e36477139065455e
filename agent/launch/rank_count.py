"""Counts the ranks of a node for a `--nproc-per-node` that is a word: `auto`, `gpu`, `cpu`, or the name of another kind of device.

The launcher's own Python counts as its torchrun would. If it does not answer, the agent counts the devices itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ...resilience.errors import UsageError
from .python_check import ANSWERS_S, AS_THE_LAUNCHER, as_what, run
from .torchrun import Launch

_COUNT = f"""{AS_THE_LAUNCHER}
from torch.distributed.run import determine_local_world_size
try:
    found = determine_local_world_size(sys.argv[2])
except ValueError as error:
    found = f"0 {{error}}"
print()
print(found)
"""


def counted(launch: Launch, environ: Mapping[str, str]) -> Launch:
    """Return the launch with its number of ranks. Raises UsageError if there are none."""
    if not launch.counts:
        return launch
    if launch.counts in ("gpu", "auto", "musa") and _moore_threads(environ):  # torch counts CUDA's devices only
        ranks, why = _devices(launch.counts, environ), ""
    else:
        ranks, why = _asked(launch, environ) or (_devices(launch.counts, environ), "")
    if not ranks:
        raise UsageError(
            f"--nproc-per-node {launch.counts}: {f'{why}; nothing was started. G' if why else 'g'}ive the number of processes on this node"
        )
    return replace(launch, ranks=ranks)


def _asked(launch: Launch, environ: Mapping[str, str]) -> tuple[int, str] | None:
    """Return the number that torch counts, or 0 and why it counts none. None: the launcher's Python does not answer."""
    if not launch.interpreter:
        return None
    done = run([*launch.interpreter, "-c", _COUNT, as_what(launch), launch.counts], environ, ANSWERS_S)
    if done is None or done.returncode:
        return None
    number, _, why = done.stdout.decode(errors="replace").strip().rpartition("\n")[2].partition(" ")
    return (int(number), why.rstrip(".")) if number.isdecimal() else None


def _moore_threads(environ: Mapping[str, str]) -> bool:
    return bool(environ.get("MUSA_VISIBLE_DEVICES")) or any(Path("/dev").glob("mtgpu.*"))


def _devices(kind: str, environ: Mapping[str, str]) -> int:
    """Return the number of devices or CPUs that this machine shows; 0: there are none of this kind."""
    if kind == "cpu":
        return os.cpu_count() or 1
    if kind not in ("auto", "gpu", "musa"):
        return 0
    visible = environ.get("MUSA_VISIBLE_DEVICES") or environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        return len(visible.split(","))
    found = [
        p for p in Path("/dev").iterdir() if p.name.removeprefix("nvidia").isdigit() or p.name.startswith("mtgpu.")
    ]
    return len(found) or (os.cpu_count() or 1 if kind == "auto" else 0)
