"""What the controller writes: the one record that agents obey, and what goes with it."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from .incident import Incident
from .request import Answer, Request
from .rewind import Turn
from .state_machine import Phase
from .types import Generation, NodeId, OrderedBy, Step

PASSED_ON = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT
"""What torchrun passes on to its ranks."""


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
    pause_s: float = 0.0
    """How long it gathers at the least, in seconds."""
    exit_code: int = 0
    """For ENDING and ENDED: what every agent exits with."""
    complete: bool = False
    """For ENDING and ENDED: the training has come to its end; nothing is left to be done."""
    last_snapshot: bool = False
    """For ENDING: whether the ranks take a snapshot before they leave,"""
    leave_in_s: float = 0.0
    """and how long that may take in all, from when an agent hears of it (clocks may differ); 0: as its configuration says."""
    paused: bool = False
    """The ranks wait at their next boundary."""
    rewind: RewindOrder | None = None
    """What its ranks are to do: the last that was ordered, in this generation or before it."""
    onset: Step = Step(-1)
    """The first step that is known to be wrong: what generations before this one (where the job ends: this one too) have computed from
    there on is not to be gone back to. -1: the state is not suspected."""
    begins: RewindOrder | None = None
    """The order by which it begins at `resume_step`."""
    snapshot: str = ""
    """The last request for a snapshot on disk that is to be obeyed."""
    moving: str = ""
    """Why the next generation is to be on other nodes: these ranks wait for it, with their state on disk;"""
    moving_s: float = 0.0
    """since then, in wall-clock time;"""
    moving_after: int = 0
    """and by then they had obeyed the order to go back of this number: 0: none."""
    joined: dict[NodeId, Generation] = field(default_factory=dict)
    """Since which generation each member has been one without a break, this agent or one before it on the node: what its memory holds from
    before that may be of another course of the training."""
    trained: int = 0
    """On how many nodes the ranks of the last generation before this one that made a step made it; 0: none is known to have."""
    sources: dict[NodeId, Source] = field(default_factory=dict)
    """Of the members whose own memory does not hold `resume_step`, those that can have it from another's."""
    holders: dict[NodeId, NodeId] = field(default_factory=dict)
    """Who holds the copies of whose snapshots, where it is not the member half the ring away (`buddy_sources.holder`)."""
    new: tuple[NodeId, ...] = ()
    """While it gathers: members that were none of the last generation whose ranks may have begun,"""
    left: tuple[NodeId, ...] = ()
    """and those of that one that are none any more (`rank_assignment.elders`)."""
    dismissed: tuple[str, ...] = ()
    """Agents that are to leave, as soon as the job goes on without them."""

    @property
    def settled(self) -> bool:
        """Its members have met."""
        return self.phase not in (Phase.GATHER, Phase.LAUNCH)

    @property
    def lets_go(self) -> bool:
        """Who is dismissed may leave: it goes on without, or nothing of it runs."""
        return self.settled or self.idle

    def pauses(self, now: float) -> bool:
        """Whether its ranks are not to start yet. now: wall-clock seconds, of whoever leads now: where clocks differ it is over sooner, or
        lasts up to twice as long."""
        return abs(now - self.opened_s) < self.pause_s

    @property
    def idle(self) -> bool:
        """Nothing of it runs, and the next start waits, since starts fail."""
        return self.phase is Phase.GATHER and self.pause_s > 0

    @property
    def signal(self) -> int:
        """For ENDING: the signal by which somebody wants the job to end, as torchrun knows it; 0: it ends by itself."""
        number = max(0, self.exit_code - 128)
        return number if number in (0, *PASSED_ON) else signal.SIGTERM

    @property
    def over(self) -> bool:
        """Or about to be."""
        return self.phase in (Phase.ENDING, Phase.ENDED)

    @property
    def waits(self) -> bool:
        """Whether the ranks are to wait at their next boundary."""
        return self.paused or bool(self.moving)

    @property
    def saves(self) -> str:
        """What a snapshot on disk is wanted for; empty: for nothing."""
        return f"move {self.moving_s} {self.moving_after}" if self.moving else self.snapshot

    def node_rank(self, node: NodeId) -> int:
        """The torchrun node rank of `node`; ValueError when it is not a member."""
        return list(self.members).index(node)


@dataclass(frozen=True, kw_only=True)
class Quarantine:
    """A node is not to train, although it is there."""

    reason: str
    until_s: float
    """Wall-clock seconds."""
    readmitted_s: float = 0.0
    """Since when somebody has it back, in wall-clock time: what had struck it before counts no more. 0: nobody has."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """All of it, at one time."""

    record: GenerationRecord | None = None
    """To be written over the World's record by compare-and-swap; None leaves it."""
    incidents: tuple[Incident, ...] = ()
    """New or changed."""
    answers: dict[str, Answer] = field(default_factory=dict)
    """By request."""
    reason: str = ""
    said: str = ""
    """For people: what of a request has been passed on to the ranks, or what a generation goes back to."""
    quarantine: dict[NodeId, Quarantine] = field(default_factory=dict)
    """Nodes that are shut out from now on, or no more."""


def answered(request: Request, sentence: str, step: int = -1, exit_code: int = 0) -> Decision:
    """Nothing but an answer."""
    return Decision(answers={request.id: Answer(sentence=sentence, step=Step(step), exit_code=exit_code)})


@dataclass(frozen=True, kw_only=True)
class Seats:
    members: dict[NodeId, str]
    """Node to agent instance, in the order of node ranks."""
    successors: dict[NodeId, NodeId] = field(default_factory=dict)
    """By the node that is gone: the spare that takes its place."""
    dropped: tuple[NodeId, ...] = ()
    """Gone, and the job goes on with fewer."""
    joined: tuple[NodeId, ...] = ()
    """Places that were not there before."""
    missed: tuple[NodeId, ...] = ()
    """Gone, and waited for."""
    at_work: bool = False
    """They are waited for although others would do: their ranks may be at work, and nobody who is there would end them."""
