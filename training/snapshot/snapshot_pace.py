"""What snapshots in memory cost this rank's loop, as measured; hence the stride that it can afford."""

from __future__ import annotations

import gc
import statistics
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from ...checkpoint.durable.save_interval import AUTO, stride

_KEPT = 9
_ENOUGH = 3
"""Figures of each kind, before anything is concluded: the first ones are slow, and the median of the last few is what is believed."""
_WINDOW = 0.9
"""Of a step, from a boundary to the optimizer's update: what copies from a device may take without holding anything up."""


class Pace:
    def __init__(self, every_steps: int) -> None:
        """every_steps: what the user has fixed, or AUTO."""
        self._fixed = every_steps
        self.stride = 1 if every_steps == AUTO else every_steps
        """Steps from one snapshot to the next, as the last one has shown."""
        self._steps_s: deque[float] = deque(maxlen=_KEPT)
        self._held_s: deque[float] = deque(maxlen=_KEPT)
        self._copied_s: deque[float] = deque(maxlen=_KEPT)

    def stepped(self, took_s: float) -> None:
        """One step of the loop, without what it spent in our hands."""
        self._steps_s.append(took_s)

    def recorded(self, held_s: float) -> None:
        """One snapshot has held the loop for so long at its boundary."""
        self._held_s.append(held_s)
        self.stride = self._affordable()

    def copied(self, took_s: float) -> None:
        """The copies from the device behind one of them took so long, from the boundary on."""
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
    """No collection of garbage within: thousands of small objects come and go there, and one that they set off takes as long as the whole
    process is large."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
