"""Whether a step's figures are so plain that `loss_spike.spike` need not look at them, known for a few comparisons.

What `spike` computes anew from 128 figures at each step costs 30 to 50 µs, and finds nothing. So the figures are looked at every
`_HOLDS` steps, for bounds that hold until the next look. Of m figures that others replace meanwhile (m = `_HOLDS` - 1), no place in the
order of size moves by more than m places. So the medians of both halves, m places up or down, say how far the slope can turn, and

    norm      <=  factor · median of the norms, m places down
    expected  >=  median of the levels, m places down - turn - |slope| m        turn: of the slope, times the baseline's length
    scale     >=  (range of the middle 95 % of the levels, m places less at both ends - turn) / 2 · 1.96

A step whose norm, and whose loss or run of losses, are not above them is no end of a spike. The bounds decide only who looks: two ranks
that had other ones would still judge alike.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .loss_spike import NORMAL_95, Figure, SpikePolicy

_HOLDS = 4
"""With 4, less than one calm step in 100 is looked at in vain, with 6 one in 10, with 8 two in 5 (simulated: a falling power law, normal
noise)."""
_NORM_LOOKS = 8
"""Looks that the bound of the norm holds for at most, with as many more places to spare: what is plain is far below it."""
_SLACK = 1e-9
"""Of the largest figure: rounding differs from that of `spike`."""


class Usual:
    def __init__(self, policy: SpikePolicy) -> None:
        self._policy = policy
        self._span = policy.baseline_steps + policy.run_steps
        """As many steps as `spike` looks at; it decides by itself until they are all known."""
        self._to_the_end = np.arange(policy.baseline_steps - 1, -1, -1.0)
        # Rings, each number in two places, so that the last `span` ones always lie in one piece, in the order of time.
        self._losses, self._norms = np.full((2, 2 * self._span), math.nan)
        self._at = self._known = 0
        """Where the next one goes; steps since one whose figures were not known."""
        self._new: list[Figure] = []
        """Since the last look: not in the rings yet."""
        self._run: tuple[float, ...] = ()
        """The last losses: together with the next step's, as many as a run has."""
        self._most_norm = self._most_loss = self._most_run = -math.inf
        """The norm and, one by itself and a run's summed up, the losses that are plain until the next look."""
        self._norm_looks = 0
        """So many more looks does the former hold."""

    def add(self, figure: Figure) -> None:
        """Of one further step, found right."""
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
        """Whether `spike` would find nothing at a step with these figures, which comes after those that were added. False: it has to look.
        A figure that is not finite is not plain."""
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
        """end: of the figures, in the rings."""
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
        self._most_loss = expected - slack if slope or turn else expected  # exactly, where a loss does not change
        self._most_run = policy.run_steps * (expected + policy.mean_sigma * scale - slack)


def _median(ordered: Any, moved: int) -> float:
    """Of an even number of figures, so many places further up."""
    half = len(ordered) // 2 + moved
    return (ordered.item(half - 1) + ordered.item(half)) / 2
