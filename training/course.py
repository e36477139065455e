"""The course of a training as all ranks have judged it: the figures of its steps, what was done about wrong ones, and which data it leaves
out. Equal on all ranks, and part of the state: a snapshot takes along what its lineage has seen."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from ..resilience import windows
from ..resilience.handoff import Handoff
from ..resilience.ladder import Turn
from ..resilience.signals import Step
from ..resilience.spikes import Figure
from ..resilience.windows import Window
from .live import Nested


class Course:
    def __init__(self, handoff: Handoff) -> None:
        policy = handoff.policy.spikes
        self._rows = np.full((policy.baseline_steps + policy.run_steps, 3), math.nan)
        """Step, loss and norm of the last steps, each in the place that its number gives; NaN for what is not known."""
        self.figures: list[Figure] = []
        """The same, ascending."""
        self.turns: list[Turn] = list(handoff.turns)
        known = [turn.window for turn in handoff.turns if turn.window]
        self.windows = windows.merged((*handoff.windows, *known))
        self._past: Sequence[Window] = ()
        self._before: list[Figure] = []
        """What was known before the last restore."""

    def judged(self, figure: Figure) -> None:
        """Of one further step, found right."""
        known = (math.nan if value is None else value for value in (figure.loss, figure.grad_norm))
        self._rows[figure.step % len(self._rows)] = (figure.step, *known)
        self.figures = [*self.figures[-len(self._rows) + 1 :], figure]

    def turned(self, turn: Turn) -> None:
        self.turns.append(turn)
        if turn.window:
            self.windows = windows.merged((*self.windows, turn.window))

    def batch(self, step: int) -> int:
        return windows.batch(step, self.windows)

    def jump(self, step: int) -> int:
        return windows.jump(step, self.windows)

    # -- as a source of state ----------------------------------------------------------------------------------------------

    def collect(self) -> Nested:
        return {"figures": torch.from_numpy(self._rows), "windows": [[w.start, w.stop] for w in self.windows]}

    def restore(self, kept: Nested) -> None:
        self._before = self.figures
        rows = (row for row in kept["figures"].tolist() if not math.isnan(row[0]))
        self._rows.fill(math.nan)
        self.figures = []
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
