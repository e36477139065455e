"""Follows, without waiting, whether a rank's device reaches the end of the work that the rank has queued.

    a thread puts a mark behind the queued work ──▶ the device copies the mark's number to the rank's page ──▶ the agent reads it

The copy is part of the stream, so the device makes it when all work before it is done. No thread asks the device, and none waits for it. A
mark is put only if the rank has been silent for a second, then twice a second: the boundary of a quick step costs nothing. Several marks
spread over a long queue show that the device advances in it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from ...resilience.clock import monotonic_ns
from ...resilience.ipc.board_layout import MARKS, Page
from .. import device

_MOST = 64
"""The most marks that may wait in the queue. A runtime's queue takes about a thousand operations."""


class DeviceProbe:
    def __init__(self, kind: str, page: Page) -> None:
        """Call on the thread of the loop, whose stream is followed. kind: the type of its device. page: the rank's block of shared
        memory."""
        self._kind, self._page = kind, page
        self._module = device.module(kind)
        self._device, self._stream = self._module.current_device(), self._module.current_stream()
        self._numbers = torch.arange(MARKS, dtype=torch.int64, device=kind)
        self._since_ns: dict[int, int] = {}
        """When each mark was put that waits in the queue, by number."""

    def begin(self) -> bool:
        """Call on the thread that will call `put`. Return False if the runtime lacks what the probe needs: then nothing is known of the
        device. A copy to memory that is not pinned would wait for the device."""
        with suppress(RuntimeError):
            self._module.set_device(self._device)
            return self._begin()
        return False

    def _begin(self) -> bool:
        copy, captured = device.copy_rows(self._kind), device.captures(self._kind)
        if copy is None or captured is None or not device.allow_capture(self._kind):
            return False
        if not device.register(self._kind, self._page.raw):
            return False
        self._copy, self._captured, self._own = copy, captured, self._module.Stream()
        return True

    def put(self) -> None:
        """Put a mark behind the queued work, and one on a stream of our own. Raises RuntimeError if the runtime refuses."""
        page, now_ns = self._page, monotonic_ns()
        self.follow()
        if len(self._since_ns) < _MOST and not self._captured(self._stream):
            number = (page.device_queued + 1) % MARKS
            self._since_ns[number] = now_ns
            page.device_since_ns = next(iter(self._since_ns.values()))
            page.device_queued = number  # before the call, which waits for room if the queue is full
            self._mark("device_reached", number, self._stream)
        if page.device_called == page.device_answered:
            page.device_called = number = (page.device_called + 1) % MARKS
            self._mark("device_answered", number, self._own)

    def follow(self) -> None:
        """Forget the marks that the device has reached."""
        if self._page.device_reached == self._page.device_queued:
            self._since_ns.clear()
        elif self._page.device_reached in self._since_ns:
            while next(iter(self._since_ns)) != self._page.device_reached:
                del self._since_ns[next(iter(self._since_ns))]
            del self._since_ns[self._page.device_reached]
        self._page.device_since_ns = next(iter(self._since_ns.values()), 0)

    def _mark(self, field: str, number: int, stream: Any) -> None:
        to = device.address(self._page.raw) + 8 * Page.place(field)
        self._copy(to, 8, self._numbers.data_ptr() + 8 * number, 8, 8, 1, True, stream)
