"""This rank's part in one snapshot, from its start until all ranks know its outcome."""

from __future__ import annotations

from dataclasses import dataclass

from ...resilience.inprocess.tally import Held, Wanted
from .device_copy import Job


@dataclass
class Attempt:
    """This rank's part of one snapshot, which all ranks have started at the same step."""

    step: int
    wanted: Wanted
    job: Job | None = None
    missed: bool = False
    unsavable: bool = False
    bound: str = ""
    """The reason why only this process can restore the snapshot; empty if a new process can restore it too."""
    settled: bool = False
    """Whether all ranks know the snapshot's outcome."""

    @property
    def held(self) -> Held:
        if self.missed:
            return Held.UNSAVABLE if self.unsavable else Held.MISSED
        held = Held.WHOLE if self.job is None else self.job.held
        return Held.IN_PLACE if held is Held.WHOLE and self.bound else held
