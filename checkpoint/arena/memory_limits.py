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

_RESERVE_BYTES = 512 << 20
_RESERVE_PART = 10
"""A growing slot leaves `_RESERVE_BYTES`, or this part of each limit (a tenth), to all other processes. A slot never shrinks. When memory
runs out, the kernel kills a rank rather than refuse a page."""

_FEW = 4
"""A slot leaves at most this many times the bytes that it needs, or `_RESERVE_BYTES`."""


def room(nbytes: int, what: str) -> NDArray[np.uint8]:
    """Return `nbytes` zeros. Raises MachineError if there is not enough memory for them."""
    try:
        return np.zeros(nbytes, np.uint8)
    except (MemoryError, ValueError) as error:  # ValueError: more bytes than an address can express
        raise MachineError(f"{what} has {nbytes} bytes, and there is no memory for them. Nothing was read") from error


def available_bytes(root: Path = Path("/")) -> int:
    """Return the number of bytes that this process may still allocate. root: the directory that contains proc/ and sys/."""
    return min(left for _, left in _limits(root))


def bytes_for_slot(growth: int, root: Path = Path("/")) -> int:
    """Return the number of bytes by which a slot that needs `growth` more may grow. As many stay available as well: each rank may load a
    checkpoint of its state into memory. A small slot, or one that needs a few pages more, leaves less than `_RESERVE_PART`."""
    limits = [(left, min(limit // _RESERVE_PART, _FEW * growth)) for limit, left in _limits(root)]
    return min(left - max(_RESERVE_BYTES, part, growth) for left, part in limits)


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


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield each limit, of the machine and of its control groups, and how many bytes are left. Page cache that the kernel can drop does not
    count as used."""
    lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    machine = {words[0]: int(words[1]) << 10 for words in lines}
    yield machine["MemTotal:"], machine["MemAvailable:"]
    for directory, limit, used, stat in _groups(root):
        with suppress(OSError, ValueError):  # the group has no limit ("max"), or the files of another cgroup version
            reclaimable = dict(line.split() for line in (directory / stat).read_text().splitlines())
            cache = int(reclaimable.get("total_inactive_file", reclaimable.get("inactive_file", 0)))
            most = int((directory / limit).read_text())
            yield most, most - int((directory / used).read_text()) + cache


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
