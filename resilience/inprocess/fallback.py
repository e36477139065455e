"""Compute some steps with a lower learning rate or a higher precision, if skipping data did not cure a fault. Pure.

Both are off by default. OPT-175B lowered its learning rate to get past a spike (arXiv:2205.01068, 2.5). PaLM skipped data and did not need
a lower rate (arXiv:2204.02311, 5.1). If one of the two is configured, the second and each further data skip for the same fault
(`rewind_ladder`) is a *rescue*. A rescue covers the steps from the restored state to the onset, and as many steps after the onset as
batches are skipped. The recorded rewinds determine these steps, so each restart of the job computes the same steps in the same way. Later
steps are computed as usual.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import UsageError
from ..model.rewind import Remedy, Turn


@dataclass(frozen=True, kw_only=True)
class RescuePolicy:
    """What the ranks change if the same fault recurs although they skipped data."""

    lr_scale: float = 1.0
    """Factor for the learning rate of the steps around the data that the ranks skip next. Afterwards the schedule's own learning rate holds
    again. 1: no change. 0.5: half the learning rate."""
    precision: bool = False
    """Whether the steps around the data that the ranks skip next are computed without FP8. For Megatron this switches `config.fp8` off. In
    a loop with `Session`, `session.careful` is true and the loop decides."""

    def __post_init__(self) -> None:
        if not 0 < self.lr_scale <= 1:
            raise UsageError(f"rescue.lr_scale is {self.lr_scale}; it must be more than 0, and 1 at the most")

    @property
    def on(self) -> bool:
        return self.precision or self.lr_scale < 1


def careful(step: int, turns: Iterable[Turn]) -> bool:
    """Whether the step that follows `step` finished steps belongs to a rescue."""
    return any(
        turn.to <= step < turn.onset + turn.window.stop - turn.window.start
        for turn in turns
        if turn.remedy is Remedy.RESCUE and turn.window
    )
