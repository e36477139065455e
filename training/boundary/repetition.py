"""Whether replayed steps give the same figures as before.

Equal figures show that the whole state came back, and the data with it. Other figures show that something is missing in the snapshots, or
that the training does not repeat to the bit. Nothing here can tell which of the two.
"""

from __future__ import annotations

import math
from collections import deque

from ...resilience.ipc.board_layout import Page
from ...resilience.ipc.handoff import Reached
from ...resilience.model.signals import Repeated

_REMEMBERED = 512
"""So many steps are remembered. Rewinds in place go back a hundred at most by default (`SnapshotPolicy.reach_steps`)."""


class Repetition:
    """Compares this rank's own figures."""

    def __init__(self, page: Page, reached: Reached | None) -> None:
        """reached: the last step before a restart, if the restart replays it."""
        self._page = page
        self._past: deque[Reached] = deque(maxlen=_REMEMBERED)
        self._expected = {reached.step: reached} if reached else {}

    def crossed(self, step: int, loss: float, grad_norm: float) -> None:
        """Note and compare the figures of a step; NaN: this rank does not know one."""
        self._past.append(Reached(step, loss, grad_norm))
        if not self._expected:
            return
        before = self._expected.pop(step, None)
        pairs = [(before.loss, loss), (before.grad_norm, grad_norm)] if before else []
        known = [was == now for was, now in pairs if math.isfinite(was)]
        if known and self._page.repeated != Repeated.OTHER:
            self._page.repeated = Repeated.SAME if all(known) else Repeated.OTHER

    def went_back(self, to: int, onset: int) -> None:
        """Expect the steps after `to` again, on the same data. Those before `onset` were right."""
        self._page.repeated = Repeated.UNKNOWN
        self._expected = {each.step: each for each in self._past if to < each.step < onset}
        while self._past and self._past[-1].step > to:
            self._past.pop()
