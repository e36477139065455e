"""Measures a rank's own time for a step: the time without waiting for its peers. The agent compares it between ranks
(`resilience/detect/straggler.py`).

    waiting = time in `Work.wait`, where the collectives of Python code end, and sleep of the thread in a backward pass, where
              DistributedDataParallel's collectives end; all other time between two boundaries is the rank's own

Sleep is time in which this thread neither ran on a processor nor queued for one. So if another process takes the rank's processor, that
time counts as the rank's own, not as waiting. The measurement costs about 15 µs per backward pass, and 1 µs per collective (measured, two
cores).

The measurement works only on a CPU: a device's stream waits for its peers where no host thread can measure it. Other waiting (functional
collectives, DDP's broadcast of buffers) counts as own time on all ranks. Counting such waiting as own time may hide a straggler, but makes
no rank look like one.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ...resilience.clock import monotonic_ns, thread_ns
from ...resilience.ipc.board_layout import Page
from ...resilience.ipc.file_descriptors import high

_TELL_NS = 250_000_000
"""Nanoseconds between two readings of the kernel's clocks. The clocks are not read at each step: a reading takes 20 us if a step has
emptied the caches (measured)."""


class OwnTime:
    def __init__(self, page: Page) -> None:
        """Start to measure the calling thread, and report on `page` (the rank's block of shared memory). Create only one per process."""
        self._page = page
        self._thread = threading.get_ident()
        self._waited_ns = 0
        self._inside = False
        self._from_ns: int | None = None
        self._own_ns = self._steps = 0
        """The rank's own time and its number of steps since the last report."""
        self._told_ns, self._told = 0, (0, 0)
        """The time of the last report, and processor and queueing time then."""
        try:
            schedstat = f"/proc/self/task/{threading.get_native_id()}/schedstat"
            self._queue = high(os.open(schedstat, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:  # the kernel does not provide it: queueing counts as sleep then
            self._queue = -1
        dist.Work.wait = self._waits(dist.Work.wait)  # type: ignore[method-assign]
        torch.autograd.backward = self._sleeps(torch.autograd.backward)  # type: ignore[assignment]

    def begin(self, now_ns: int) -> None:
        """Record that a step begins."""
        self._waited_ns, self._from_ns = 0, now_ns
        if not self._told_ns:
            self._told_ns, *told = self._clocks()
            self._told = told[0], told[1]

    def drop(self) -> None:
        """Discard the running step: a step with an evaluation or a checkpoint is not comparable with others."""
        self._from_ns, self._told_ns = None, 0
        self._own_ns = self._steps = 0

    def end(self, now_ns: int) -> None:
        """Record that a step is done."""
        if self._from_ns is None:
            return
        self._own_ns += now_ns - self._from_ns - self._waited_ns
        self._steps += 1
        self._from_ns = None
        if now_ns - self._told_ns >= _TELL_NS:
            _, computed, queued = self._clocks()
            self._page.timed(self._own_ns, computed - self._told[0], queued - self._told[1], self._steps)
            self._told_ns, self._told = now_ns, (computed, queued)
            self._own_ns = self._steps = 0

    def _clocks(self) -> tuple[int, int, int]:
        """Return wall time, processor time, and time in the queue for a processor, in nanoseconds."""
        queued = int(os.pread(self._queue, 64, 0).split()[1]) if self._queue >= 0 else 0
        return monotonic_ns(), thread_ns(), queued

    def _elsewhere(self) -> bool:
        """Whether a call is not measured: it is no part of a step, or of another thread, or within another call."""
        return self._inside or self._from_ns is None or threading.get_ident() != self._thread

    def _waits(self, original: Callable[..., Any]) -> Callable[..., Any]:
        # C++ must not call this again for a Python subclass of Work without a `wait`. pybind recognizes the call of the original by the
        # caller's name and first parameter.
        @functools.wraps(original)
        def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            if self._elsewhere():
                return original(work, *args, **kwargs)
            self._inside, began = True, monotonic_ns()
            try:
                return original(work, *args, **kwargs)
            finally:
                self._waited_ns += monotonic_ns() - began
                self._inside = False

        return wait

    def _sleeps(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._elsewhere():
                return original(*args, **kwargs)
            self._inside, began = True, self._clocks()
            try:
                return original(*args, **kwargs)
            finally:
                took, computed, queued = (b - a for a, b in zip(began, self._clocks(), strict=True))
                self._waited_ns += max(0, took - computed - queued)
                self._inside = False

        return backward
