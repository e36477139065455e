"""Follows, without waiting, whether a rank's device reaches the end of the work that the rank has queued.

    a thread puts a mark behind the queued work ──▶ the device copies the mark's number to the rank's page ──▶ the agent reads it

The copy is part of the stream, so the device executes it when all work before it is done. No thread queries the device or waits for it. A
mark is put only if the rank has been silent for a second, then twice a second: the boundary of a quick step costs nothing. Several marks
spread over a long queue show that the device advances in it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import torch

from ...resilience.clock import monotonic_ns
from ...resilience.ipc.board_layout import MARKS, Page
from .. import device

_QUEUES = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
"""How many queues the streams of a device share. In a single one, each stream may wait for all others."""
_MOST = 64
"""The most marks that may wait in the queue. A runtime's queue takes about a thousand operations."""


class DeviceProbe:
    def __init__(self, where: torch.device, page: Page) -> None:
        """Call on the thread of the loop, whose stream on this device is followed. page: the rank's block of shared memory."""
        self._device, self._page = where, page
        self._module = device.module(where.type)
        self._stream = self._module.current_stream(where)
        self._since_ns: dict[int, int] = {}
        """For each mark that waits in the queue: its number, and when it was put there."""

    def begin(self) -> bool:
        """Call on the thread that will call `put`. Return False if the runtime lacks what the probe needs: then nothing is known of the
        device. A copy to memory that is not pinned would wait for the device."""
        with suppress(RuntimeError):
            self._module.set_device(self._device)
            return self._begin()
        return False

    def _begin(self) -> bool:
        kind = self._device.type
        copy, captured = device.copy_rows(kind), device.captures(kind)
        if copy is None or captured is None or not device.allow_capture(kind):
            return False
        if not device.register(kind, self._page.raw):
            return False
        self._copy, self._captured = copy, captured
        self._own = self._module.Stream(self._device, priority=-1)  # a script's streams seldom have this priority
        with self._module.stream(self._own):
            self._numbers = torch.arange(MARKS, dtype=torch.int64, device=self._device)
        self._own.synchronize()  # the marks on the loop's stream read the numbers too
        return True

    def put(self) -> None:
        """Put a mark behind the queued work, and one on a stream of our own, unless all streams of the device wait in one queue. Raises
        RuntimeError if the runtime refuses, or if the device cannot be followed any longer."""
        page, now_ns = self._page, monotonic_ns()
        self.follow()
        if len(self._since_ns) < _MOST and not self._captured(self._stream):
            number = (page.device_queued + 1) % MARKS
            self._since_ns[number] = now_ns
            page.device_since_ns = next(iter(self._since_ns.values()))
            page.device_queued = number  # before the call, which waits for room if the queue is full
            self._mark("device_reached", number, self._stream)
            if self._captured(self._stream):
                raise RuntimeError("the mark may be part of a graph: each replay would put an old number on the page")
        if page.device_called == page.device_answered and _QUEUES != "1" and not self._captured(self._own):
            page.device_called = number = (page.device_called + 1) % MARKS
            self._mark("device_answered", number, self._own)

    def follow(self) -> None:
        """Forget the marks that the device has reached. If the number on the page belongs to no waiting mark, it was forgotten before."""
        reached = self._page.device_reached  # read once: the device may write it meanwhile
        while reached in self._since_ns:
            del self._since_ns[next(iter(self._since_ns))]
        self._page.device_since_ns = next(iter(self._since_ns.values()), 0)

    def _mark(self, field: str, number: int, stream: Any) -> None:
        to = device.address(self._page.raw) + 8 * Page.place(field)
        self._copy(to, 8, self._numbers.data_ptr() + 8 * number, 8, 8, 1, True, stream)
