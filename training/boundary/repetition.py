"""Whether steps that are computed again give the figures that they gave before.

Equal figures show that the whole state came back, and the data with it. Other figures show that something is missing in the snapshots, or
that the training does not repeat to the bit; which of the two, nothing here can tell.
"""

from __future__ import annotations

import math
from collections import deque

from ...resilience.ipc.board_layout import Page
from ...resilience.ipc.handoff import Reached
from ...resilience.model.signals import Repeated

_REMEMBERED = 512
"""Steps. Rewinds in place go back a hundred at most by default (`SnapshotPolicy.reach_steps`)."""


class Repetition:
    """Of this rank's own figures."""

    def __init__(self, page: Page, reached: Reached | None) -> None:
        """reached: the last step of the life before, where a restart computes it again."""
        self._page = page
        self._past: deque[Reached] = deque(maxlen=_REMEMBERED)
        self._expected = {reached.step: reached} if reached else {}

    def crossed(self, step: int, loss: float, grad_norm: float) -> None:
        """A step has given these figures; NaN where this rank does not know one."""
        self._past.append(Reached(step, loss, grad_norm))
        if not self._expected:
            return
        before = self._expected.pop(step, None)
        pairs = [(before.loss, loss), (before.grad_norm, grad_norm)] if before else []
        known = [was == now for was, now in pairs if math.isfinite(was)]
        if known and self._page.repeated != Repeated.OTHER:
            self._page.repeated = Repeated.SAME if all(known) else Repeated.OTHER

    def went_back(self, to: int, onset: int) -> None:
        """The steps behind `to` come again, on the same data, and those before `onset` were right."""
        self._page.repeated = Repeated.UNKNOWN
        self._expected = {each.step: each for each in self._past if to < each.step < onset}
        while self._past and self._past[-1].step > to:
            self._past.pop()
