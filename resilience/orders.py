"""What the controller writes: the one record that agents obey, who is shut out, the story of an incident."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from .ladder import Remedy, Turn
from .machine import Phase
from .terms import Generation, NodeId, OrderedBy, Rank, Step
from .windows import Window


@dataclass(frozen=True, kw_only=True)
class RewindOrder:
    """All ranks are to go back, at the same boundary; or, where they are not in their loop, to begin there."""

    number: int
    """That of its incident: what ranks have obeyed they do not obey again."""
    to: Step
    skip: int = 0
    """So many batches of those that would follow are left out."""
    cause: OrderedBy = OrderedBy.OPERATOR

    @property
    def incident(self) -> str:
        return f"{self.number:04d}"


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a node gets its part of the state from: another node's memory."""

    holder: NodeId
    generation: Generation
    rewinds: int


@dataclass(frozen=True, kw_only=True)
class GenerationRecord:
    number: Generation
    phase: Phase
    members: dict[NodeId, str]
    """Node to agent instance, in the order of node ranks."""
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    resume_step: Step = Step(-1)
    """State to start from; -1: none is kept anywhere, start as the script itself does."""
    replay_until: Step = Step(-1)
    """Step that the generation before had reached: up to there it is computed again. -1: none."""
    turns: tuple[Turn, ...] = ()
    """What ranks of earlier generations have done about wrong steps; with it, which data is left out."""
    reason: str = ""
    opened_s: float = 0.0
    """Wall-clock time of GATHER; and of LAUNCH:"""
    launched_s: float = 0.0
    exit_code: int = 0
    """For ENDING and ENDED: what every agent exits with."""
    complete: bool = False
    """For ENDING and ENDED: the training has come to its end; nothing is left to be done."""
    last_snapshot: bool = False
    """For ENDING: whether the ranks take a snapshot before they leave,"""
    leave_by_s: float = 0.0
    """and when all has to be over, in wall-clock time; 0: the agent's configuration says how long it may take."""
    paused: bool = False
    """The ranks wait at their next boundary."""
    rewind: RewindOrder | None = None
    """What its ranks are to do: the last that was ordered, in this generation or before it."""
    onset: Step = Step(-1)
    """The first step that is known to be wrong: what generations before this one have computed from there on is not to be gone back to.
    -1: the state is not suspected."""
    begins: RewindOrder | None = None
    """The order by which it begins at `resume_step`."""
    snapshot: str = ""
    """The last request for a snapshot on disk that is to be obeyed."""
    moving: str = ""
    """Why the next generation is to be on other nodes: these ranks wait for it, with their state on disk;"""
    moving_s: float = 0.0
    """since then, in wall-clock time."""
    joined: dict[NodeId, Generation] = field(default_factory=dict)
    """Since which generation each member has been one without a break, this agent or one before it on the node: what its memory holds from
    before that may be of another course of the training."""
    sources: dict[NodeId, Source] = field(default_factory=dict)
    """Of the members whose own memory does not hold `resume_step`, those that can have it from another's."""
    holders: dict[NodeId, NodeId] = field(default_factory=dict)
    """Who holds the copies of whose snapshots, where it is not the member half the ring away (`copies.holder`)."""
    dismissed: tuple[str, ...] = ()
    """Agents that are to leave, as soon as the job goes on without them."""

    @property
    def waits(self) -> bool:
        """Whether the ranks are to wait at their next boundary."""
        return self.paused or bool(self.moving)

    @property
    def saves(self) -> str:
        """What a snapshot on disk is wanted for; empty: for nothing."""
        return f"move {self.moving_s}" if self.moving else self.snapshot

    def node_rank(self, node: NodeId) -> int:
        """The torchrun node rank of `node`; ValueError when it is not a member."""
        return list(self.members).index(node)


PHASES = ("detect", "stop", "start", "build", "restore", "step", "replay")
"""Of a recovery, in order. detect: rank gone → controller knows; stop: → nothing of the old gang is left; start: → new ranks'
interpreters are up; build: → imports done, model built; restore: → state restored; step: → first step finished; replay: → back at the
step where the fault struck."""


@dataclass(frozen=True, kw_only=True)
class Quarantine:
    """A node is not to train, although it is there."""

    reason: str
    until_s: float
    """Wall-clock seconds."""
    instance: str = ""
    """As long as this agent runs; empty: whichever does."""


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
    """What the incident would have been then (`detectors.Cause`)."""
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
    onset: Step = Step(-1)
    """First step that is known to be wrong: the job goes on from an older state. -1: the state is not suspected."""
    signature: str = ""
    """What makes two faults the same fault."""
    remedy: str = ""
    """Of a rewind in place: what the ranks did besides going back (`ladder.Remedy`),"""
    window: Window | None = None
    """the batches that they leave out since,"""
    ranks: tuple[Rank, ...] = ()
    """whose own gradient was out of line then,"""
    nodes: tuple[NodeId, ...] = ()
    """where it struck first,"""
    origin: str = ""
    """and where the fault came from, as the remedy told (`ladder.Origin`); `again` where it came again."""
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
