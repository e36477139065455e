"""The incident: the record of one fault, with the program's conclusion, its answer, and how long each phase took."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from .data_windows import Window
from .rewind import Remedy, Turn
from .signals import Repeated
from .types import Generation, NodeId, Rank, Step

PHASES = ("detect", "stop", "start", "build", "restore", "step", "replay")
"""The phases of a recovery, in sequence. `detect` begins when a rank is gone; each other phase begins when the phase before it ends.
`detect` ends when the controller knows of the fault; `stop`, when the old worker group is gone and any pause is over; `start`, when the new
ranks' interpreters are up; `build`, when imports are done and the model is built; `restore`, when the state is restored; `step`, when the
first step is finished; `replay`, when the ranks are back at the step at which the fault struck."""


class Because(StrEnum):
    """Why the controller rejected another explanation."""

    FOLLOWS = "follows"
    """The rejected event is an effect of the accepted cause on other ranks, and never produces that cause."""
    LATER = "later"
    """The rejected event came later than the accepted cause."""
    WAITS = "waits"
    """A rank that waits for a lost rank hangs too."""
    AGREED = "agreed"
    """The replicas held the same bits, so no bit had flipped."""
    NOT_COUNTED = "not counted"
    """The kernel counted no kill for lack of memory."""


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """An explanation that the controller rejected."""

    cause: str
    """The cause that the incident would have according to this explanation (`cause.Cause`)."""
    because: Because
    ranks: tuple[Rank, ...] = ()
    by_s: float = 0.0
    """Seconds by which this event was seen after the accepted cause; negative: before it."""
    step: Step = Step(-1)


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One fault and the program's answer to it, as `mt-resilient explain` shows them."""

    id: str
    generation: Generation
    """The generation in which the fault struck."""
    cause: str
    rung: int
    summary: str
    evidence: tuple[str, ...] = ()
    weighed: tuple[Weighed, ...] = ()
    """Explanations that the controller rejected."""
    plan: str = ""
    would: int | None = None
    """For an incident that was only observed: the rung (kind of answer) that would have answered it. An observed incident spends no
    budget."""
    at_s: float = 0.0
    step_at_fault: Step = Step(-1)
    """The newest step that any rank had finished."""
    resume_step: Step | None = None
    """Step from which the job resumed; -1: the script's own start; None: it has not resumed."""
    started: bool = False
    """Whether any rank had finished a step in this generation."""
    loop_skipped: bool = False
    """Whether the ranks had started at the last step, so that they failed after the loop without having run a step."""
    onset: Step = Step(-1)
    """The first step that is known to be wrong, so that the job resumes from an older state; -1: no state is suspected."""
    signature: str = ""
    """Two incidents with equal signatures are the same fault."""
    left: str = ""
    """For an order to rewind: name of the snapshot to come back to, which an earlier order set aside."""
    remedy: str = ""
    """For a rewind in place: what the ranks did besides rewinding (`rewind.Remedy`)."""
    window: Window | None = None
    """Batches that the ranks skip after the rewind."""
    ranks: tuple[Rank, ...] = ()
    """Ranks whose own gradient was unusual when the fault was found."""
    nodes: tuple[NodeId, ...] = ()
    """Nodes that the fault struck first."""
    size: int = 0
    """Number of members of `generation`."""
    origin: str = ""
    """Where the fault came from, as the remedy showed (`rewind.Origin`); `again`: the remedy did not cure the fault."""
    unfit: int = 0
    """A number of nodes on which, as this incident shows, the script does not start; 0: none. The job then trains on another number of
    nodes, if it can (`rank_assignment.allowed`)."""
    pause_s: float = 0.0
    """Seconds that the ranks wait before they start again, because starts fail."""
    repeated: Repeated = Repeated.UNKNOWN
    """Whether the ranks got the same loss and gradient norm when they computed the steps up to the fault again."""
    other_data: bool = False
    """Whether the loop's data could not be put back when the ranks resumed."""
    launch: str = ""
    phases_s: dict[str, float] = field(default_factory=dict)
    """Seconds that each of PHASES took. A phase that is not over is missing."""
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

    @property
    def came_back(self) -> bool:
        """Whether an order came back to a snapshot that an earlier order set aside. Turns before that belong to another lineage."""
        return bool(self.left and self.remedy)

    def with_phase(self, name: str, seconds: float) -> Incident:
        if name in self.phases_s:
            return self
        return replace(self, phases_s={**self.phases_s, name: round(max(0.0, seconds), 4)})


def turns(incidents: Sequence[Incident]) -> list[Turn]:
    """Return the rewinds in place that concern the present lineage."""
    last = max((at for at, incident in enumerate(incidents) if incident.came_back), default=0)
    return [turn for incident in incidents[last:] if (turn := incident.turn)]


def in_order(incidents: Iterable[Incident]) -> tuple[Incident, ...]:
    """Return the incidents, oldest first. As texts, "10000" would come before "9999"."""
    return tuple(sorted(incidents, key=lambda each: int(each.id)))
