"""Finds the file descriptors that are readable or writable, or become readable within a time. Use the result immediately: after a
descriptor is closed, its number may become another file's."""

from __future__ import annotations

import math
import select
from collections.abc import Iterable


def readable(fds: Iterable[int], within_s: float = 0.0) -> list[int]:
    """within_s: `math.inf` waits without a limit."""
    return _polled(fds, select.POLLIN, within_s)


def writable(fds: Iterable[int]) -> list[int]:
    return _polled(fds, select.POLLOUT, 0.0)


def _polled(fds: Iterable[int], event: int, within_s: float) -> list[int]:
    poller = select.poll()  # select.select refuses numbers from 1024 on
    for fd in fds:
        poller.register(fd, event)
    return [fd for fd, _ in poller.poll(None if within_s == math.inf else 1000 * within_s)]
