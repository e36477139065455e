"""Computes how much memory this process may still allocate, by the limits of the machine and of all its control groups. Also counts the
processes that the kernel has killed for lack of memory.

The kernel charges shared memory to the group of the process that touches it first. When a group is at its limit, the kernel kills one of
its processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...resilience.errors import MachineError


def room(nbytes: int, what: str) -> NDArray[np.uint8]:
    """Return `nbytes` zeros. Raises MachineError if there is not enough memory for them."""
    try:
        return np.zeros(nbytes, np.uint8)
    except (MemoryError, ValueError) as error:  # ValueError: more bytes than an address can express
        raise MachineError(f"{what} has {nbytes} bytes, and there is no memory for them. Nothing was read") from error


def available_bytes(root: Path = Path("/")) -> int:
    """Return the number of bytes that this process may still allocate. root: the directory that contains proc/ and sys/."""
    meminfo = (root / "proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in meminfo if line.startswith("MemAvailable:"))
    return min([free, *_left_in_groups(root)])


def oom_kills(root: Path = Path("/")) -> tuple[int, int]:
    """Return how many processes the kernel has killed for lack of memory: in this process's own control group, and on the whole machine. A
    counter that the kernel does not provide counts as 0."""
    own = next((directory for directory, *_ in _groups(root) if directory.is_dir()), root)
    return _counted(own / "memory.events", own / "memory.oom_control"), _counted(root / "proc/vmstat")


def _counted(*files: Path) -> int:
    found = 0
    for file in files:
        with suppress(OSError, ValueError):
            found += sum(int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith("oom_kill "))
    return found


def _left_in_groups(root: Path) -> Iterator[int]:
    """Yield the limit minus the usage of each control group with a limit. Page cache that the kernel can drop does not count as usage."""
    for directory, limit, used, stat in _groups(root):
        with suppress(OSError, ValueError):  # the group has no limit ("max"), or the files of another cgroup version
            reclaimable = dict(line.split() for line in (directory / stat).read_text().splitlines())
            cache = int(reclaimable.get("total_inactive_file", reclaimable.get("inactive_file", 0)))
            yield int((directory / limit).read_text()) - int((directory / used).read_text()) + cache


def _groups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Yield this process's memory control groups, up to the root, each with the names of its files in cgroup version 2 or 1."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "memory.stat")
            elif "memory" in controllers.split(","):
                top = root / "sys/fs/cgroup/memory"
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
            else:
                continue
            # In a container the path is often the host's, and the group itself is mounted at the top.
            own = Path(path.lstrip("/"))
            for group in (own, *own.parents):
                yield (top / group, *names)
