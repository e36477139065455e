"""One snapshot as this rank takes part in it, from its beginning until all ranks know what has become of it."""

from __future__ import annotations

from dataclasses import dataclass

from ...resilience.inprocess.tally import Held, Wanted
from .device_copy import Job


@dataclass
class Attempt:
    """One snapshot that all ranks have begun at the same step; this rank's part of it."""

    step: int
    wanted: Wanted
    job: Job | None = None
    missed: bool = False
    unsavable: bool = False
    bound: str = ""
    """Why only this process can go back to it; empty where a new one can."""
    settled: bool = False
    """All ranks know what has become of it."""

    @property
    def held(self) -> Held:
        if self.missed:
            return Held.UNSAVABLE if self.unsavable else Held.MISSED
        held = Held.WHOLE if self.job is None else self.job.held
        return Held.IN_PLACE if held is Held.WHOLE and self.bound else held
