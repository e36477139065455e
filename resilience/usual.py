"""Whether a step's figures are so plain that `spikes.spike` need not look at them, known step by step for a few microseconds.

What `spike` computes anew from 128 figures at each step costs 30 to 50 µs, and finds nothing. Kept sorted, the same figures give the median
of the gradient's baseline exactly, and for the loss bounds: leaving out the trend moves no figure further than the whole trend, so

    expected  >=  median - trend         scale  >=  (range of the middle 95 % - trend) / 2 · 1.96

A step that is not above them is no end of a spike.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

from .spikes import NORMAL_95, Figure, SpikePolicy

_SLACK = 1e-9
"""Relative: rounding differs from that of `spike`."""


class Window:
    """The last so many numbers, also in order of size."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._in_time: deque[float] = deque()
        self.sorted: list[float] = []

    @property
    def full(self) -> bool:
        return len(self.sorted) == self._size

    @property
    def median(self) -> float:
        half = self._size // 2
        return self.sorted[half] if self._size % 2 else (self.sorted[half - 1] + self.sorted[half]) / 2

    def add(self, number: float) -> float | None:
        """The number that falls out, if one does."""
        self._in_time.append(number)
        insort(self.sorted, number)
        if len(self._in_time) <= self._size:
            return None
        oldest = self._in_time.popleft()
        del self.sorted[bisect_left(self.sorted, oldest)]
        return oldest


class Usual:
    def __init__(self, policy: SpikePolicy) -> None:
        self._policy = policy
        self._half = policy.baseline_steps // 2
        self._unknown = policy.baseline_steps + policy.run_steps
        """Steps since one whose figures were not all known, up to as many as `spike` looks at: then it decides by itself."""
        self._norms, self._all = Window(policy.baseline_steps), Window(policy.baseline_steps)
        self._later, self._earlier = Window(self._half), Window(self._half)
        self._run: deque[float] = deque()

    def add(self, figure: Figure) -> None:
        """Of one further step, found right."""
        if figure.loss is None or figure.grad_norm is None:
            self._unknown = 0
            return
        self._unknown += 1
        self._norms.add(figure.grad_norm)
        self._run.append(figure.loss)
        if len(self._run) < self._policy.run_steps:
            return
        passed = self._run.popleft()
        self._all.add(passed)
        middle = self._later.add(passed)
        if middle is not None:
            self._earlier.add(middle)

    def plain(self, figure: Figure) -> bool:
        """Whether `spike` would find nothing at this step, which comes after those that were added. False: it has to look."""
        policy = self._policy
        if self._unknown < policy.baseline_steps + policy.run_steps or figure.loss is None or figure.grad_norm is None:
            return False
        if not (self._norms.full and self._all.full and self._earlier.full) or policy.baseline_steps % 2:
            return False
        if figure.grad_norm > policy.gradient_factor * self._norms.median:
            return False
        trend = abs((self._later.median - self._earlier.median) / self._half) * (policy.baseline_steps - 1)
        beyond = max(1, round(0.025 * policy.baseline_steps))
        within = self._all.sorted[-1 - beyond] - self._all.sorted[beyond] - trend
        expected = self._all.median - trend
        bound = expected + policy.mean_sigma * max(0.0, within / (2 * NORMAL_95))
        return (sum(self._run) + figure.loss) / policy.run_steps <= bound - _SLACK * abs(bound)
