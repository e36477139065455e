"""Checks whether replayed steps give the same figures as before.

Equal figures show that the whole state was restored, and the data with it. Different figures have one of two reasons: the snapshots lack
something, or the training is not reproducible to the bit. This module cannot tell which reason it is.
"""

from __future__ import annotations

import math
from collections import deque

from ...resilience.ipc.board_layout import Page
from ...resilience.ipc.handoff import Reached
from ...resilience.model.signals import Repeated

_REMEMBERED = 512
"""The most steps that are remembered. Rewinds in place go back at most a hundred steps by default (`SnapshotPolicy.reach_steps`)."""


class Repetition:
    """Compares this rank's own figures."""

    def __init__(self, page: Page, reached: Reached | None) -> None:
        """reached: the last step before a restart, if the restart replays that step."""
        self._page = page
        self._past: deque[Reached] = deque(maxlen=_REMEMBERED)
        self._expected = {reached.step: reached} if reached else {}

    def crossed(self, step: int, loss: float, grad_norm: float) -> None:
        """Record the figures of a step, and compare them with those before the rewind. NaN: this rank does not know the figure."""
        self._past.append(Reached(step, loss, grad_norm))
        if not self._expected:
            return
        before = self._expected.pop(step, None)
        pairs = [(before.loss, loss), (before.grad_norm, grad_norm)] if before else []
        known = [was == now for was, now in pairs if math.isfinite(was)]
        if known and self._page.repeated != Repeated.OTHER:
            self._page.repeated = Repeated.SAME if all(known) else Repeated.OTHER

    def went_back(self, to: int, onset: int) -> None:
        """Expect the steps after `to` again, on the same data. Only steps before `onset`, which were right, are compared."""
        self._page.repeated = Repeated.UNKNOWN
        self._expected = {each.step: each for each in self._past if to < each.step < onset}
        while self._past and self._past[-1].step > to:
            self._past.pop()
