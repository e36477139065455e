"""Measure how much time snapshots in memory cost this rank's loop, and derive an affordable number of steps between them.

The cost of a snapshot is the time that it adds to steps: the stop at the boundary (the moment between two steps), the optimizer's wait for
the copies, and the slowdown while copies use the memory and the link. So steps that run during copies are compared with other steps.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from ...checkpoint.durable.save_interval import AUTO, stride

_KEPT = 9
_ENOUGH = 3
"""The least number of measurements of each kind for a conclusion. The first measurements are slow, so the median of the last `_KEPT` is
used."""


class Pace:
    def __init__(self, every_steps: int) -> None:
        """every_steps: the interval that the user has set, or AUTO."""
        self._fixed = every_steps
        self.stride = 1 if every_steps == AUTO else every_steps
        """The number of steps between two snapshots, according to the latest measurement."""
        self._free_s: deque[float] = deque(maxlen=_KEPT)
        self._held_s: deque[float] = deque(maxlen=_KEPT)
        self._beside_s: deque[list[float]] = deque(maxlen=_KEPT)
        """For each snapshot, the seconds of the steps that ran during its copies, and of the step after them. If a script waits for its
        device before the optimizer's step, the optimizer's wait lengthens only that later step."""
        self._waited_s: deque[float] = deque(maxlen=_KEPT)
        self._after = False
        self._apart = 1
        """The number of steps between two snapshots until enough steps without copies are known. This number doubles while no step runs
        without copies, because copies may take many steps."""
        self._without = 0
        """The number of snapshots since the last step without copies."""
        self._since, self._since_s, self._worth_s = 0, 0.0, math.inf
        """The number of steps since the last snapshot; their seconds; and the seconds that the last measurement allows between two
        snapshots."""
        self.last = -1
        """The step of the last snapshot that all ranks have begun."""

    def due(self, step: int, stride: int) -> bool:
        """Whether a snapshot is due after `step` steps. stride: the value on which all ranks last agreed. A measured stride varies: if
        snapshots were due at its multiples, they would be taken too often."""
        return step % stride == 0 if self._fixed != AUTO else step - self.last >= stride

    def stepped(self, took_s: float, *, beside: bool = False) -> None:
        """Record the seconds of one step of the loop, without the time spent in this program. beside: copies ran during the step."""
        if self._beside_s and (beside or self._after):
            self._beside_s[-1].append(took_s)
        else:
            self._free_s.append(took_s)
            self._without = 0
        self._after = beside
        self._since, self._since_s = self._since + 1, self._since_s + took_s
        if self._since_s >= self._worth_s:  # steps have become longer, as when a script begins to learn
            self.stride = min(self.stride, self._since)

    def recorded(self, held_s: float) -> None:
        """Record the seconds for which one snapshot has delayed the loop at its boundary."""
        self._held_s.append(held_s)
        if self._without == _KEPT:  # the known times may be those of the first steps, which are slow
            self._free_s.clear()
            self._apart = 1
        if self._without and len(self._free_s) < _ENOUGH:
            self._apart *= 2
        self._without += 1
        self.stride = self._affordable()
        self._since, self._since_s, self._worth_s = 0, 0.0, self._worth()
        self._beside_s.append([])

    def waited(self, seconds: float) -> None:
        """Record the seconds for which a device has waited for a snapshot's copies. If a script does not wait for its device at each step,
        the host sees steps of equal length, so only this figure shows the wait."""
        self._waited_s.append(seconds)

    def _affordable(self) -> int:
        beside = [each for each in self._beside_s if each]
        if self._fixed != AUTO:
            return self._fixed
        if len(self._free_s) < _ENOUGH:
            return self._apart
        if len(self._held_s) < _ENOUGH:
            return 1
        step_s = statistics.median(self._free_s)
        longer_s = [sum(each) - len(each) * step_s for each in beside]
        costs = [statistics.median(each) for each in (longer_s, self._waited_s) if len(each) >= _ENOUGH]
        return stride(statistics.median(self._held_s) + max(0.0, *costs, 0.0), step_s)

    def _worth(self) -> float:
        """Return the seconds of training after which a snapshot is worth its cost; infinity if not known."""
        if self._fixed != AUTO or len(self._free_s) < _ENOUGH:
            return math.inf
        return self.stride * statistics.median(self._free_s)


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection inside the block. The block creates and deletes thousands of small objects, which could trigger a
    collection. A collection takes longer the more objects the whole process has."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
