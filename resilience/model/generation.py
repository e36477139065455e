"""What the controller writes: the record that all agents obey, and its decisions."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from .incident import Incident
from .request import Answer, Request
from .rewind import Turn
from .state_machine import Phase
from .types import Generation, NodeId, OrderedBy, Step

PASSED_ON = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT
"""Signals that torchrun passes on to its ranks."""


@dataclass(frozen=True, kw_only=True)
class RewindOrder:
    """An order to all ranks to go back, at the same boundary. Ranks that are not in their loop begin there instead."""

    number: int
    """Number of its incident. Ranks obey the same number only once."""
    to: Step
    skip: int = 0
    """Number of following batches to leave out."""
    cause: OrderedBy = OrderedBy.OPERATOR

    @property
    def incident(self) -> str:
        return f"{self.number:04d}"


@dataclass(frozen=True, kw_only=True)
class Source:
    """The copy from which a node gets its part of the state: in another node's memory."""

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
    """Step of the state to start from; -1: no state is kept anywhere, so the script starts by itself."""
    replay_until: Step = Step(-1)
    """Newest step that earlier generations reached: steps up to it are computed again. -1: none."""
    turns: tuple[Turn, ...] = ()
    """Rewinds in place that ranks of earlier generations did. They also tell which data is left out."""
    reason: str = ""
    opened_s: float = 0.0
    """Wall-clock time at which GATHER began; `launched_s`: LAUNCH."""
    launched_s: float = 0.0
    pause_s: float = 0.0
    """Seconds that GATHER lasts at least."""
    exit_code: int = 0
    """In ENDING and ENDED: the exit code of every agent."""
    complete: bool = False
    """In ENDING and ENDED: the training is complete; nothing is left to do."""
    last_snapshot: bool = False
    """In ENDING: whether the ranks take a snapshot before they leave."""
    leave_in_s: float = 0.0
    """In ENDING: seconds for that snapshot and for leaving. An agent counts from when it reads this, because clocks may differ. 0: as its
    configuration says."""
    paused: bool = False
    """The ranks wait at their next boundary."""
    rewind: RewindOrder | None = None
    """The order to go back that its ranks are to obey: the last one, from this generation or before it."""
    onset: Step = Step(-1)
    """The first step that is known to be wrong; -1: no state is suspected. Ranks must not go back to states from there on that earlier
    generations computed. If the job ends, this holds for this generation's states too."""
    begins: RewindOrder | None = None
    """The order to go back because of which it begins at `resume_step`."""
    snapshot: str = ""
    """Id of the last request for a snapshot on disk that the ranks are to obey."""
    moving: str = ""
    """Why the next generation will be on other nodes: the ranks save their state on disk and wait for it. Empty: it will not."""
    moving_s: float = 0.0
    """Wall-clock time since which the ranks are to wait for it."""
    moving_after: int = 0
    """Number of the last order to go back that they had obeyed by then; 0: none."""
    joined: dict[NodeId, Generation] = field(default_factory=dict)
    """By member that joined later: the generation since which the node has been a member without a break, even if its agent restarted.
    Its memory from before that may belong to another lineage."""
    trained: int = 0
    """Number of nodes of the last generation before this one that finished a step; 0: no such generation is known."""
    sources: dict[NodeId, Source] = field(default_factory=dict)
    """By member whose own memory lacks `resume_step`: where it gets its part, if another node's memory holds it."""
    holders: dict[NodeId, NodeId] = field(default_factory=dict)
    """By member: the node that holds copies of its snapshots, unless that is the one half the ring away (`buddy_sources.holder`)."""
    new: tuple[NodeId, ...] = ()
    """While it gathers: members that did not belong to the last generation whose ranks may have begun."""
    left: tuple[NodeId, ...] = ()
    """While it gathers: members of that generation that are no longer members (`rank_assignment.elders`)."""
    dismissed: tuple[str, ...] = ()
    """Instances of drained agents. They leave as soon as the job goes on without them."""

    @property
    def settled(self) -> bool:
        """Whether its members have met: GATHER and LAUNCH are over."""
        return self.phase not in (Phase.GATHER, Phase.LAUNCH)

    @property
    def lets_go(self) -> bool:
        """Whether dismissed agents may leave: the job goes on without them, or no rank runs."""
        return self.settled or self.idle

    def pauses(self, now: float) -> bool:
        """Whether its ranks must not start yet. now: wall-clock seconds of the present leader. If leaders' clocks differ, the pause ends
        sooner or lasts up to twice as long."""
        return abs(now - self.opened_s) < self.pause_s

    @property
    def idle(self) -> bool:
        """Whether no rank runs and the next start waits, because starts fail."""
        return self.phase is Phase.GATHER and self.pause_s > 0

    @property
    def signal(self) -> int:
        """In ENDING: the signal that asked the job to end, or SIGTERM if torchrun does not pass it on; 0: the job ends by itself."""
        number = max(0, self.exit_code - 128)
        return number if number in (0, *PASSED_ON) else signal.SIGTERM

    @property
    def over(self) -> bool:
        """Whether the job has ended or is about to."""
        return self.phase in (Phase.ENDING, Phase.ENDED)

    @property
    def waits(self) -> bool:
        """Whether the ranks are to wait at their next boundary."""
        return self.paused or bool(self.moving)

    @property
    def saves(self) -> str:
        """Name of the move or request that needs a snapshot on disk; empty: nothing does."""
        return f"move {self.moving_s} {self.moving_after}" if self.moving else self.snapshot

    def node_rank(self, node: NodeId) -> int:
        """The torchrun node rank of `node`; ValueError when it is not a member."""
        return list(self.members).index(node)


@dataclass(frozen=True, kw_only=True)
class Quarantine:
    """A node that is present but must not train."""

    reason: str
    until_s: float
    """Wall-clock seconds."""
    readmitted_s: float = 0.0
    """Wall-clock time at which an operator readmitted it: faults before that no longer count. 0: never."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Everything that the controller decides at one time."""

    record: GenerationRecord | None = None
    """Record to write over the World's record by compare-and-swap; None: the record stays."""
    incidents: tuple[Incident, ...] = ()
    """New or changed incidents."""
    answers: dict[str, Answer] = field(default_factory=dict)
    """By the request's id."""
    reason: str = ""
    said: str = ""
    """A sentence for people: what was passed on to the ranks for a request, or which state a generation goes back to."""
    quarantine: dict[NodeId, Quarantine] = field(default_factory=dict)
    """Nodes that are quarantined from now on, or no longer."""


def answered(request: Request, sentence: str, step: int = -1, exit_code: int = 0) -> Decision:
    """Return a decision that only answers `request`."""
    return Decision(answers={request.id: Answer(sentence=sentence, step=Step(step), exit_code=exit_code)})


@dataclass(frozen=True, kw_only=True)
class Seats:
    members: dict[NodeId, str]
    """Node to agent instance, in the order of node ranks."""
    successors: dict[NodeId, NodeId] = field(default_factory=dict)
    """By lost node: the spare that takes its place."""
    dropped: tuple[NodeId, ...] = ()
    """Members whose place nobody takes: the job goes on with fewer nodes."""
    joined: tuple[NodeId, ...] = ()
    """Nodes by which the job grows."""
    missed: tuple[NodeId, ...] = ()
    """Lost nodes for which the job waits."""
    at_work: bool = False
    """The job waits for members although enough other nodes are there. The members' ranks may still train, and no present node
    would end them."""
