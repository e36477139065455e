"""A cheap test that makes `loss_spike.spike` unnecessary at most steps: a few comparisons show that `spike` would find nothing.

`spike` computes everything anew from 128 figures, which takes 30 to 50 µs at each step and finds nothing at most steps. This module
computes bounds every `_HOLDS` steps, and each bound is valid until it is computed again. In between, at most m = `_HOLDS` - 1 figures are
replaced. So the k-th smallest figure stays between the former (k - m)-th and (k + m)-th. The medians of both halves, taken m places up or
down, therefore bound the slope's change, and

    norm      <=  factor · median of the norms, m places down
    expected  >=  median of the levels, m places down - turn - |slope| m        turn: change of the slope, times the baseline's length
    scale     >=  (range of the middle 95 % of the levels, m places less at both ends - turn) / 2 · 1.96

No spike ends at a step whose norm, and whose loss or run of losses, are within these bounds. The bounds decide only whether `spike` runs:
two ranks with different bounds would still judge alike.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .loss_spike import NORMAL_95, Figure, SpikePolicy

_HOLDS = 4
"""Number of steps between two computations of the bounds. With 4, `spike` runs needlessly at less than one calm step in 100, with 6 at one
in 10, with 8 at two in 5 (simulated: a falling power law, normal noise)."""
_NORM_LOOKS = 8
"""The norm's bound is valid for at most this many periods of `_HOLDS` steps. Its median is taken one place lower for each of these steps:
usual norms are far below the bound even so."""
_SLACK = 1e-9
"""Safety margin of the bounds, as a share of the largest figure: this module rounds differently from `spike`."""


class Usual:
    def __init__(self, policy: SpikePolicy) -> None:
        self._policy = policy
        self._span = policy.baseline_steps + policy.run_steps
        """Number of steps that `spike` uses. Until the figures of so many steps are known, `spike` runs at every step."""
        self._to_the_end = np.arange(policy.baseline_steps - 1, -1, -1.0)
        # Ring buffers that hold each number twice, so that the last `span` numbers are contiguous and in order of time.
        self._losses, self._norms = np.full((2, 2 * self._span), math.nan)
        self._at = self._known = 0
        """`_at`: index of the next number in the ring buffers. `_known`: number of steps since a step with unknown figures."""
        self._new: list[Figure] = []
        """Figures that are not in the ring buffers yet."""
        self._run: tuple[float, ...] = ()
        """The last `run_steps` - 1 losses. Together with the next step's loss, they are one run."""
        self._most_norm = self._most_loss = self._most_run = -math.inf
        """Present bounds: of the norm, of one loss, and of the sum of a run's losses."""
        self._norm_looks = 0
        """Number of periods of `_HOLDS` steps for which the norm's bound is still valid."""

    def add(self, figure: Figure) -> None:
        """Add the figures of the next step, in which no fault was found."""
        _, loss, norm = figure
        if loss is None or norm is None:
            self._new, self._run, self._known = [], (), 0
            self._most_norm, self._norm_looks = -math.inf, 0
            return
        self._run = (*self._run, loss)[1 - self._policy.run_steps :] if self._policy.run_steps > 1 else ()
        self._new.append(figure)
        if len(self._new) == _HOLDS:
            self._look()

    def plain(self, loss: float, norm: float) -> bool:
        """Whether `spike` would certainly find nothing if the next step had these figures. False: `spike` must run. Figures that are not
        finite always give False."""
        if not -math.inf < norm <= self._most_norm or loss == -math.inf:
            return False
        return loss <= self._most_loss or sum(self._run, loss) <= self._most_run

    def _look(self) -> None:
        losses, norms = self._losses, self._norms
        for _, loss, norm in self._new:
            at, also = self._at, self._at + self._span
            losses[at] = losses[also] = loss
            norms[at] = norms[also] = norm
            self._at = (at + 1) % self._span
        self._known += len(self._new)
        self._new = []
        if self._known >= self._span:
            self._bound(self._at + self._span)

    def _bound(self, end: int) -> None:
        """Compute the bounds. end: index after the newest figure in the ring buffers."""
        policy, moved = self._policy, _HOLDS - 1
        size, half = policy.baseline_steps, policy.baseline_steps // 2
        if size % 2 or half // 2 <= moved:
            return
        self._norm_looks -= 1
        if self._norm_looks <= 0:
            self._norm_looks = min(half // _HOLDS, _NORM_LOOKS)
            norms = self._norms[end - size : end].copy()
            norms.sort()
            self._most_norm = policy.gradient_factor * norms.item(half - self._norm_looks * _HOLDS)
        end -= policy.run_steps - 1
        losses = self._losses[end - size : end]
        earlier, later = halves = losses.reshape(2, half).copy()
        halves.sort()
        rise, most, least = (_median(later, m) - _median(earlier, -m) for m in (0, moved, -moved))
        slope, turn = rise / half, max(most - rise, rise - least) / half * (size - 1)
        level = losses + slope * self._to_the_end
        level.sort()
        beyond = max(1, round(0.025 * size)) + moved
        scale = max(0.0, level.item(-1 - beyond) - level.item(beyond) - turn) / (2 * NORMAL_95)
        expected = _median(level, -moved) - turn - abs(slope) * moved
        slack = _SLACK * (max(abs(level.item(0)), abs(level.item(-1))) + abs(slope) * size)
        self._most_loss = expected - slack if slope or turn else expected  # exact, if the loss does not change
        self._most_run = policy.run_steps * (expected + policy.mean_sigma * scale - slack)


def _median(ordered: Any, moved: int) -> float:
    """Return the median of an even number of sorted figures, taken `moved` places higher."""
    half = len(ordered) // 2 + moved
    return (ordered.item(half - 1) + ordered.item(half)) / 2
