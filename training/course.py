"""The course of a training as all ranks have judged it: the figures of its steps, what was done about wrong ones, and which data it leaves
out. Equal on all ranks, and part of the state: a snapshot takes along what its lineage has seen."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

from ..resilience import rescue, windows
from ..resilience.handoff import Handoff
from ..resilience.ladder import Turn
from ..resilience.signals import Step
from ..resilience.spikes import Figure
from ..resilience.usual import Usual
from ..resilience.windows import Window
from .live import Nested


class Course:
    def __init__(self, handoff: Handoff) -> None:
        self._policy = policy = handoff.policy.spikes
        self._usual = Usual(policy)
        self._rows = np.full((policy.baseline_steps + policy.run_steps, 3), math.nan)
        """Step, loss and norm of the last steps, each in the place that its number gives; NaN for what is not known."""
        self._flat: Any = self._rows.reshape(-1).data
        """The same memory, faster to write to."""
        self.figures: deque[Figure] = deque(maxlen=len(self._rows))
        """The same, ascending."""
        self.turns: list[Turn] = list(handoff.turns)
        known = [turn.window for turn in handoff.turns if turn.window]
        self.windows = windows.merged((*handoff.windows, *known))
        self._past: Sequence[Window] = ()
        self._before: list[Figure] = []
        """What was known before the last restore."""

    def judged(self, figure: Figure) -> None:
        """Of one further step, found right."""
        step, loss, grad_norm = figure
        at, flat = step % len(self._rows) * 3, self._flat
        flat[at] = step
        flat[at + 1] = math.nan if loss is None else loss
        flat[at + 2] = math.nan if grad_norm is None else grad_norm
        self.figures.append(figure)
        self._usual.add(figure)

    def before(self, figure: Figure) -> Collection[Figure]:
        """What `figure` has to be judged by: nothing, where it is plain that it is no spike."""
        return () if self._usual.plain(figure) else self.figures

    def turned(self, turn: Turn) -> None:
        self.turns.append(turn)
        if turn.window:
            self.windows = windows.merged((*self.windows, turn.window))

    def careful(self, step: int) -> bool:
        return rescue.careful(step, self.turns)

    def batch(self, step: int) -> int:
        return windows.batch(step, self.windows)

    def jump(self, step: int) -> int:
        return windows.jump(step, self.windows)

    # -- as a source of state ----------------------------------------------------------------------------------------------

    def collect(self) -> Nested:
        return {"figures": torch.from_numpy(self._rows), "windows": [[w.start, w.stop] for w in self.windows]}

    def restore(self, kept: Nested) -> None:
        self._before = list(self.figures)
        rows = (row for row in kept["figures"].tolist() if not math.isnan(row[0]))
        self._rows.fill(math.nan)
        self.figures.clear()
        self._usual = Usual(self._policy)
        for row in sorted(rows)[-len(self._rows) :]:
            self.judged(_figure(row))
        self._past = [Window(start, stop) for start, stop in kept["windows"]]

    def went_back(self, step: int) -> None:
        """The state after `step` steps has been restored: what it was computed without holds, and what is to be left out from there on."""
        self.windows = windows.ahead(step, self._past, self.windows)
        # A state is kept before its own step is judged; whoever goes back in place has judged it since.
        for figure in (figure for figure in self._before if figure.step == step):
            self.judged(figure)


def _figure(row: Sequence[float]) -> Figure:
    step, loss, grad_norm = row
    return Figure(Step(int(step)), *(None if math.isnan(value) else value for value in (loss, grad_norm)))
