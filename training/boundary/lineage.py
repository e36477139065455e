"""The course of a training: the record of what all ranks have judged. The course contains the steps' figures, the answers to wrong steps,
the skipped data, and the position in the data. The course is equal on all ranks, and part of the state: a snapshot contains the course up
to its own step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from ...resilience.clock import monotonic_ns
from ...resilience.inprocess import fallback, loss_level
from ...resilience.inprocess.loss_level import Level
from ...resilience.inprocess.loss_spike import Figure, Finding
from ...resilience.ipc.board_events import Rewound
from ...resilience.ipc.handoff import Handoff
from ...resilience.model import data_windows
from ...resilience.model.data_windows import Window
from ...resilience.model.generation import RewindOrder
from ...resilience.model.rewind import Remedy, Turn, left_out
from ...resilience.model.types import Rank, Step
from ..attach.attach import Attachment
from ..data.batches import Batches
from ..state.tensors.in_place import Nested


class Course:
    def __init__(self, handoff: Handoff) -> None:
        policy = handoff.policy.spikes
        self._policy = policy
        self._rows = np.full((policy.baseline_steps + policy.run_steps + policy.patience_steps, 3), math.nan)
        """Step, loss and gradient norm of the last steps. The step's number determines the row; NaN: unknown."""
        self._unwritten = 0
        """How many of the figures are not in `_rows` yet."""
        self.figures: deque[Figure] = deque(maxlen=len(self._rows))
        """The figures of the last steps, ascending by step."""
        self.level = Level()
        """What is known of the losses, besides the last figures."""
        self.turns: list[Turn] = list(handoff.turns)
        self._given = handoff.windows
        self.windows = data_windows.merged((*self._given, *left_out(self.turns)))
        self._past: Sequence[Window] = ()
        self._before: list[Figure] = []
        """The figures that were known before the last restore."""
        self.asked: dict[str, Any] = {}
        """How long the loop is to train: total steps and epochs; and the agents that were alive when the script asked for this."""
        self.asked_before: dict[str, Any] = {}
        """The value of `asked` in the restored snapshot."""
        self.data: Batches | None = None
        """The loop's position in its data; None: the loop restores that itself."""

    def judged(self, figure: Figure, level: Level) -> None:
        """Add the figures of one more step, which was judged right. level: what is known of the losses after it."""
        self._unwritten += 1
        self.figures.append(figure)
        self.level = level

    def turned(self, turn: Turn) -> None:
        self.turns.append(turn)
        if turn.remedy is Remedy.CONTINUE:
            self.windows = data_windows.merged((*self._given, *left_out(self.turns)))
        elif turn.window:
            self.windows = data_windows.merged((*self.windows, turn.window))

    def careful(self, step: int) -> bool:
        return fallback.careful(step, self.turns)

    def batch(self, step: int) -> int:
        return data_windows.batch(step, self.windows)

    def jump(self, step: int) -> int:
        return data_windows.jump(step, self.windows)

    # -- as a source of state ----------------------------------------------------------------------------------------------

    def collect(self) -> Nested:
        for step, *known in islice(reversed(self.figures), self._unwritten):
            self._rows[step % len(self._rows)] = step, *(math.nan if value is None else value for value in known)
        self._unwritten = 0
        data = {} if self.data is None else {"data": self.data.place()}
        windows = [[w.start, w.stop] for w in self.windows]
        level = torch.tensor(self.level.numbers(), dtype=torch.float64)
        return {
            "figures": torch.from_numpy(self._rows),
            "level": level,
            "windows": windows,
            "asked": dict(self.asked),
            **data,
        }

    def restore(self, kept: Nested) -> None:
        self._before = list(self.figures)
        rows = (row for row in kept["figures"].tolist() if not math.isnan(row[0]))
        self._rows.fill(math.nan)
        self.figures.clear()
        self._unwritten = 0
        for row in sorted(rows)[-len(self._rows) :]:
            self.judged(_figure(row), self.level)
        self.level = Level.of(kept["level"].tolist()) if "level" in kept else Level()
        self._past = [Window(start, stop) for start, stop in kept["windows"]]
        self.asked_before = kept.get("asked", {})
        if self.data is not None and "data" in kept:
            self.data.go_to(kept["data"])

    def went_back(self, step: int) -> None:
        """Adapt to the restored state after `step` steps. The windows are the data skipped on the way to that state, and the data still to
        be skipped."""
        self.windows = data_windows.ahead(step, self._past, self.windows)
        # A snapshot is taken before its own step is judged. Ranks that rewind in place have judged that step since.
        for figure in (figure for figure in self._before if figure.step == step):
            self.judged(figure, loss_level.judge((*self.figures, figure), self.level, self._policy)[1])
        if self.turns and (self.turns[-1].to, self.turns[-1].remedy) == (step, Remedy.CONTINUE):
            # No remedy has brought the loss back, so later losses are not compared with earlier ones.
            self._rows.fill(math.nan)
            self.figures.clear()
            self._unwritten, self.level = 0, Level()


def _figure(row: Sequence[float]) -> Figure:
    step, loss, grad_norm = row
    return Figure(Step(int(step)), *(None if math.isnan(value) else value for value in (loss, grad_norm)))


def obey(order: RewindOrder, course: Course, at: Attachment, started_ns: int, *, known_data: bool) -> None:
    """Continue the course from the state that `order` names, which was just restored, and report the rewind to the agent."""
    course.went_back(order.to)
    window = data_windows.following(order.to, order.skip, course.windows) if order.skip else None
    replay = Remedy.REPLAY if known_data else Remedy.REWIND
    remedy = Remedy.SKIP if window else replay
    turn = Turn(kind=order.cause, onset=Step(order.to + 1), to=order.to, remedy=remedy, window=window)
    course.turned(turn)
    note(at, turn, started_ns, order=order.number)


def note(
    at: Attachment,
    turn: Turn,
    started_ns: int,
    *,
    finding: Finding | None = None,
    ranks: tuple[Rank, ...] = (),
    order: int = 0,
) -> None:
    """Record for the agent that the ranks have rewound, because of a finding or by an order."""
    at.page.rewound(
        Rewound(
            kind=turn.kind,
            onset=turn.onset,
            reached=max(at.page.step, turn.to),
            to=turn.to,
            remedy=turn.remedy,
            window=turn.window,
            value=finding.value if finding else 0.0,
            expected=finding.expected if finding else 0.0,
            ranks=ranks,
            at_ns=started_ns,
            done_ns=monotonic_ns(),
            order=order,
        )
    )
