"""Our own file descriptors: none of the three that every program takes for its terminal, and none that a script is likely to use."""

from __future__ import annotations

import fcntl
import os
import sys
from contextlib import suppress
from pathlib import Path

FLOOR = 100
"""Our descriptors that stay open lie above it. So a script that writes to a low number, open or not, never writes to one of ours."""


def high(fd: int) -> int:
    """Take `fd` over, and return the same file under a number from `FLOOR` on, which an exec closes. If the limit for open files is lower,
    or all numbers are taken, return `fd` itself."""
    with suppress(OSError):
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FLOOR)
        os.close(fd)
        return moved
    return fd


def appending(path: Path) -> int:
    """Return a descriptor for appending to the log file at `path`, which is created if missing. Raises OSError."""
    return high(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644))


def fill_standard() -> None:
    """Open /dev/null as stdin, stdout or stderr if this program was started without (`>&-`): else the next opened file would become it."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
