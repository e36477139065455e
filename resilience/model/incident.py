"""The story of one fault: what was concluded, what was done about it, how long that took."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from .data_windows import Window
from .rewind import Remedy, Turn
from .signals import Repeated
from .types import Generation, NodeId, Rank, Step

PHASES = ("detect", "stop", "start", "build", "restore", "step", "replay")
"""Of a recovery, in order. detect: rank gone → controller knows; stop: → nothing of the old worker group is left, and no pause; start: →
new ranks' interpreters are up; build: → imports done, model built; restore: → state restored; step: → first step finished; replay: → back
at the step where the fault struck."""


class Because(StrEnum):
    """What speaks against an explanation."""

    FOLLOWS = "follows"
    """The cause brings it about in others, and it never brings about the cause."""
    LATER = "later"
    """It came later."""
    WAITS = "waits"
    """Who waits for a rank that is gone hangs too."""
    AGREED = "agreed"
    """Replicas were the same."""
    NOT_COUNTED = "not counted"
    """The kernel has counted nothing of the kind."""


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """An explanation that was weighed, and lost."""

    cause: str
    """What the incident would have been then (`registry.Cause`)."""
    because: Because
    ranks: tuple[Rank, ...] = ()
    by_s: float = 0.0
    """Seconds after the cause; negative: before it was seen."""
    step: Step = Step(-1)


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One fault and its answer, as `mt-resilient explain` tells it."""

    id: str
    generation: Generation
    """The generation it struck."""
    cause: str
    rung: int
    summary: str
    evidence: tuple[str, ...] = ()
    weighed: tuple[Weighed, ...] = ()
    """What else it might have been."""
    plan: str = ""
    would: int | None = None
    """Of an incident that was observed only: the rung that would have answered it. It spends no budget."""
    at_s: float = 0.0
    step_at_fault: Step = Step(-1)
    """Newest step finished by any rank."""
    resume_step: Step | None = None
    """State that the job went on from, -1: the script's own start; None: it has not gone on."""
    started: bool = False
    """Whether any rank had finished a step in this generation."""
    loop_skipped: bool = False
    """The ranks had begun at the last step, so the loop's body had not run when they failed behind it."""
    onset: Step = Step(-1)
    """First step that is known to be wrong: the job goes on from an older state. -1: the state is not suspected."""
    signature: str = ""
    """What makes two faults the same fault."""
    remedy: str = ""
    """Of a rewind in place: what the ranks did besides going back (`rewind_ladder.Remedy`),"""
    window: Window | None = None
    """the batches that they leave out since,"""
    ranks: tuple[Rank, ...] = ()
    """whose own gradient was out of line then,"""
    nodes: tuple[NodeId, ...] = ()
    """where it struck first,"""
    size: int = 0
    """of how many nodes in that generation,"""
    origin: str = ""
    """and where the fault came from, as the remedy told (`rewind_ladder.Origin`); `again` where it came again."""
    unfit: int = 0
    """On so many nodes the script does not start, as was concluded here: the job trains on another number, if one can be had
    (`rank_assignment.allowed`). 0: it may on any."""
    pause_s: float = 0.0
    """How long the ranks wait before they start again, in seconds: starts fail."""
    repeated: Repeated = Repeated.UNKNOWN
    """What the ranks found when they computed the steps up to the fault again."""
    launch: str = ""
    phases_s: dict[str, float] = field(default_factory=dict)
    """Seconds by phase of PHASES; a phase that is not over yet is missing."""
    open: bool = True

    @property
    def lost_steps(self) -> int:
        """Steps that have to be computed again."""
        if self.resume_step is None:
            return 0
        return max(0, self.step_at_fault - max(0, self.resume_step))

    @property
    def turn(self) -> Turn | None:
        """The rewind in place that this is the story of."""
        if not self.remedy or self.resume_step is None:
            return None
        return Turn(
            kind=self.cause,
            onset=self.onset if self.onset >= 0 else Step(self.resume_step + 1),
            to=self.resume_step,
            remedy=Remedy(self.remedy),
            window=self.window,
        )

    def with_phase(self, name: str, seconds: float) -> Incident:
        if name in self.phases_s:
            return self
        return replace(self, phases_s={**self.phases_s, name: round(max(0.0, seconds), 4)})
