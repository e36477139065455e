"""Finds the file descriptors that are readable, or become so within a time. Use the result immediately: after a descriptor is closed, its
number may become another file's."""

from __future__ import annotations

import select
from collections.abc import Iterable


def readable(fds: Iterable[int], within_s: float = 0.0) -> list[int]:
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return [fd for fd, _ in poller.poll(1000 * within_s)]
