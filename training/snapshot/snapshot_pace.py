"""Measure what snapshots in memory cost this rank's loop, and derive the stride that it can afford."""

from __future__ import annotations

import gc
import statistics
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from ...checkpoint.durable.save_interval import AUTO, stride

_KEPT = 9
_ENOUGH = 3
"""The measurements of each kind that a conclusion needs: the first ones are slow, so the median of the last `_KEPT` counts."""
_WINDOW = 0.9
"""The share of a step from a boundary to the optimizer's update. Copies from a device may take so long without holding anything up."""


class Pace:
    def __init__(self, every_steps: int) -> None:
        """every_steps: the interval that the user has fixed, or AUTO."""
        self._fixed = every_steps
        self.stride = 1 if every_steps == AUTO else every_steps
        """The steps from one snapshot to the next, according to the latest measurement."""
        self._steps_s: deque[float] = deque(maxlen=_KEPT)
        self._held_s: deque[float] = deque(maxlen=_KEPT)
        self._copied_s: deque[float] = deque(maxlen=_KEPT)

    def stepped(self, took_s: float) -> None:
        """Record the time of one step of the loop, without the time spent in this program."""
        self._steps_s.append(took_s)

    def recorded(self, held_s: float) -> None:
        """Record how long one snapshot has held the loop at its boundary."""
        self._held_s.append(held_s)
        self.stride = self._affordable()

    def copied(self, took_s: float) -> None:
        """Record how long a snapshot's copies from the device took, from the boundary on."""
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
    """Disable garbage collection within. Thousands of small objects come and go there, and could trigger a collection, whose time grows
    with the whole process."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
