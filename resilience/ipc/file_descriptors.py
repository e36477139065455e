"""Keeps our own file descriptors off the numbers 0 to 2, which every program takes for its terminal, and off those that a script may
use."""

from __future__ import annotations

import fcntl
import os
import sys
from contextlib import suppress
from pathlib import Path

FLOOR = 100
"""The lowest number of our long-lived descriptors. So a script that writes to a low number, open or not, never writes to our files."""


def high(fd: int) -> int:
    """Close `fd`, and return a descriptor of the same file, numbered `FLOOR` or higher, which an exec closes. If the limit for open files
    is lower, or all numbers are taken, return `fd` itself."""
    with suppress(OSError):
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FLOOR)
        os.close(fd)
        return moved
    return fd


def appending(path: Path) -> int:
    """Return a descriptor for appending to the log file `path`. If the file is missing, create it. Raises OSError."""
    return high(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644))


def fill_standard() -> None:
    """Open /dev/null as stdin, stdout or stderr if this program was started without it (`>&-`). If such a stream stays closed, the next
    opened file takes its number."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(
                os.open(os.devnull, os.O_RDWR), True
            )  # open takes the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
