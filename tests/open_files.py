"""Says which files a test's process has open.

A test must not count descriptors: the garbage collector closes those of other tests at any time.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def open_files() -> set[str]:
    """Return the targets of the process's descriptors, such as a path or `pipe:[<inode>]`."""
    targets: set[str] = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            targets.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return targets


@contextmanager
def numbers_beyond_select() -> Iterator[None]:
    """Take all numbers below 1024, as an agent with many ranks does: `select.select` refuses those of the files that a block opens."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(2048, limits[0]), limits[1]))
    taken = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while taken[-1] < 1024:
            taken.append(os.dup(taken[0]))
        yield
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
