"""File descriptors of ours: none of the three that every program takes for its terminal, and none that a script is likely to meet."""

from __future__ import annotations

import fcntl
import os
import sys
from contextlib import suppress
from pathlib import Path

FLOOR = 100
"""Descriptors that stay open lie above it: a script that writes to a low number of its own, open or not, never writes to one of ours."""


def high(fd: int) -> int:
    """Takes `fd` over: the same file under a number above `FLOOR`, closed at an exec. Where the limit for open files is lower than that, or
    all are taken, `fd` itself."""
    with suppress(OSError):
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FLOOR)
        os.close(fd)
        return moved
    return fd


def appending(path: Path) -> int:
    """A descriptor of the log file at `path`, which is made where it is missing. Raises OSError."""
    return high(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644))


def fill_standard() -> None:
    """Open /dev/null where this program was started without stdin, stdout or stderr (`>&-`): the next file that is opened would be it."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
