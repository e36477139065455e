"""The record of one fault: what the program concluded, what it did, and how long that took."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from .data_windows import Window
from .rewind import Remedy, Turn
from .signals import Repeated
from .types import Generation, NodeId, Rank, Step

PHASES = ("detect", "stop", "start", "build", "restore", "step", "replay")
"""Phases of a recovery, in order. Each ends at the event behind its arrow. detect: rank gone → controller knows; stop: → old worker group
gone, pause over; start: → new ranks' interpreters are up; build: → imports done, model built; restore: → state restored; step: → first
step finished; replay: → back at the step where the fault struck."""


class Because(StrEnum):
    """Why another explanation was rejected."""

    FOLLOWS = "follows"
    """The cause has this effect on other ranks, and the effect never produces the cause."""
    LATER = "later"
    """It came later than the cause."""
    WAITS = "waits"
    """A rank that waits for a lost rank hangs too."""
    AGREED = "agreed"
    """The replicas agreed."""
    NOT_COUNTED = "not counted"
    """The kernel counted no such event."""


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """Another explanation, which was rejected."""

    cause: str
    """The cause that the incident would have had then (`cause.Cause`)."""
    because: Because
    ranks: tuple[Rank, ...] = ()
    by_s: float = 0.0
    """Seconds by which it was seen after the cause; negative: before it."""
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
    """Other explanations, which were rejected."""
    plan: str = ""
    would: int | None = None
    """For an incident that was only observed: the rung that would have answered it. Such an incident spends no budget."""
    at_s: float = 0.0
    step_at_fault: Step = Step(-1)
    """Newest step finished by any rank."""
    resume_step: Step | None = None
    """Step from which the job resumed; -1: the script's own start; None: it has not resumed."""
    started: bool = False
    """Whether any rank had finished a step in this generation."""
    loop_skipped: bool = False
    """The ranks had begun at the last step, so they failed after the loop without having run its body."""
    onset: Step = Step(-1)
    """First step that is known to be wrong: the job resumes from an older state. -1: the state is not suspected."""
    signature: str = ""
    """Two incidents with equal signatures are the same fault."""
    remedy: str = ""
    """For a rewind in place: what the ranks did besides going back (`rewind.Remedy`)."""
    window: Window | None = None
    """Batches that the ranks leave out since that rewind."""
    ranks: tuple[Rank, ...] = ()
    """Ranks whose own gradient was out of line then."""
    nodes: tuple[NodeId, ...] = ()
    """Nodes that the fault struck first."""
    size: int = 0
    """Number of members of that generation."""
    origin: str = ""
    """Where the fault came from, as the remedy showed (`rewind.Origin`); `again`: the fault came again."""
    unfit: int = 0
    """Number of nodes on which the script does not start, as concluded here; 0: none. The job then trains on another number, if
    one is available (`rank_assignment.allowed`)."""
    pause_s: float = 0.0
    """Seconds that the ranks wait before they start again, because starts fail."""
    repeated: Repeated = Repeated.UNKNOWN
    """Whether the figures were the same when the ranks computed the steps up to the fault again."""
    launch: str = ""
    phases_s: dict[str, float] = field(default_factory=dict)
    """Seconds by phase of PHASES; a phase that is not over yet is missing."""
    open: bool = True

    @property
    def lost_steps(self) -> int:
        """Number of steps that the ranks must compute again."""
        if self.resume_step is None:
            return 0
        return max(0, self.step_at_fault - max(0, self.resume_step))

    @property
    def turn(self) -> Turn | None:
        """The rewind in place that this incident records; None: it records none."""
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
