"""Measure how much time snapshots in memory cost this rank's loop, and derive an affordable number of steps between them."""

from __future__ import annotations

import gc
import statistics
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from ...checkpoint.durable.save_interval import AUTO, stride

_KEPT = 9
_ENOUGH = 3
"""The least number of measurements of each kind for a conclusion. The first are slow, so the median of the last `_KEPT` is used."""
_WINDOW = 0.9
"""The share of a step between the boundary (the moment between two steps) and the optimizer's update. Copies from a device that take no
longer than this delay nothing."""


class Pace:
    def __init__(self, every_steps: int) -> None:
        """every_steps: the interval that the user has set, or AUTO."""
        self._fixed = every_steps
        self.stride = 1 if every_steps == AUTO else every_steps
        """The number of steps between two snapshots, according to the latest measurement."""
        self._steps_s: deque[float] = deque(maxlen=_KEPT)
        self._held_s: deque[float] = deque(maxlen=_KEPT)
        self._copied_s: deque[float] = deque(maxlen=_KEPT)

    def stepped(self, took_s: float) -> None:
        """Record the seconds of one step of the loop, without the time spent in this program."""
        self._steps_s.append(took_s)

    def recorded(self, held_s: float) -> None:
        """Record the seconds for which one snapshot has delayed the loop at its boundary."""
        self._held_s.append(held_s)
        self.stride = self._affordable()

    def copied(self, took_s: float) -> None:
        """Record the seconds from the boundary until a snapshot's copies from the device have arrived."""
        self._copied_s.append(took_s)
        self.stride = self._affordable()

    def _affordable(self) -> int:
        if self._fixed != AUTO:
            return self._fixed
        if len(self._held_s) < _ENOUGH or len(self._steps_s) < _ENOUGH:
            return 1
        step_s = statistics.median(self._steps_s)
        beyond_s = statistics.median(self._copied_s) - _WINDOW * step_s if self._copied_s else 0.0
        return stride(statistics.median(self._held_s) + max(0.0, beyond_s), step_s)


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection inside the block. The block creates and deletes thousands of small objects, which could trigger a
    collection. Its time grows with the whole process."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
