"""The controller's output: the generation record, which all agents obey, and its decisions."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from .incident import Incident
from .request import Answer, Request
from .rewind import Turn
from .state_machine import Phase
from .types import Generation, NodeId, OrderedBy, Step

PASSED_ON = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT
"""Signals that torchrun forwards to its ranks, unless its `--signals-to-handle` names others."""


@dataclass(frozen=True, kw_only=True)
class RewindOrder:
    """An order to all ranks to rewind, all at the same boundary (between two steps). Ranks outside their training loop start from step `to`
    instead."""

    number: int
    """Number of the order's incident. Ranks obey each number only once."""
    to: Step
    skip: int = 0
    """Number of batches after step `to` to skip."""
    cause: OrderedBy = OrderedBy.OPERATOR
    left: str = ""
    """Name of a snapshot of step `to` that an earlier order set aside. The next ranks begin there. Empty: the order means step `to` of the
    present lineage."""

    @property
    def incident(self) -> str:
        return f"{self.number:04d}"


@dataclass(frozen=True, kw_only=True)
class Source:
    """The copy in another node's memory from which a node fetches its part of the state."""

    holder: NodeId
    generation: Generation
    rewinds: int


@dataclass(frozen=True, kw_only=True)
class GenerationRecord:
    number: Generation
    phase: Phase
    members: dict[NodeId, str]
    """The members, sorted by node rank, each with its agent's instance (the id of one start of an agent)."""
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    resume_step: Step = Step(-1)
    """Step of the snapshot to start from; -1: no snapshot exists, so the script starts from its own beginning."""
    resume_course: tuple[int, ...] = ()
    """Generation and number of rewinds of that snapshot, because another lineage may have a snapshot of the same step. Empty: there is no
    snapshot, or `begins` names it."""
    replay_until: Step = Step(-1)
    """Newest step that earlier generations reached; -1: none. The ranks compute the steps up to it again."""
    turns: tuple[Turn, ...] = ()
    """Rewinds in place by ranks of earlier generations, which also record the data that is skipped."""
    reason: str = ""
    opened_s: float = 0.0
    """Wall-clock time at which GATHER began; `launched_s`: at which LAUNCH began."""
    launched_s: float = 0.0
    pause_s: float = 0.0
    """The least number of seconds that GATHER lasts."""
    exit_code: int = 0
    """In ENDING and ENDED: the code with which every agent exits."""
    complete: bool = False
    """In ENDING and ENDED: whether the training is complete, so that nothing is left to do."""
    last_snapshot: bool = False
    """In ENDING: whether the ranks take a snapshot before they exit."""
    leave_in_s: float = 0.0
    """In ENDING: seconds in which the ranks must take that snapshot and exit; 0: as the configuration says. An agent counts from the moment
    at which it reads this field, because clocks may differ."""
    paused: bool = False
    """Whether the ranks must wait at their next boundary."""
    rewind: RewindOrder | None = None
    """The last order to rewind, from this generation or an earlier one. The ranks must obey it."""
    onset: Step = Step(-1)
    """The first step that is known to be wrong; -1: no state is suspected. Ranks must not rewind to a state at or after this step that an
    earlier generation computed. If the job ends, later ranks must not use this generation's states from this step on either."""
    begins: RewindOrder | None = None
    """The order to rewind that makes this generation start at `resume_step`; None: no order does."""
    snapshot: str = ""
    """Id of the last request for a snapshot on disk. The ranks must obey it."""
    moving: str = ""
    """Why the next generation will run on other nodes; empty: no move is planned. Until the move, the ranks save their state on disk and
    wait."""
    moving_s: float = 0.0
    """Wall-clock time since which the ranks must wait for this move. The field keeps its value if the move is abandoned because saving took
    too long."""
    moving_after: int = 0
    """Number of the last rewind order that the ranks had obeyed when the snapshot for this move was last ordered; 0: none."""
    joined: dict[NodeId, Generation] = field(default_factory=dict)
    """For each member that joined later: the generation since which the node has been a member without a break, even if its agent
    restarted. Snapshots in its memory from earlier generations may belong to another lineage."""
    trained: int = 0
    """The number of nodes on which the job last trained: that of the latest earlier generation that finished a step. 0: not known."""
    warmup_s: float = 0.0
    """The longest silence of a rank before and during the first steps of any earlier start, in seconds; 0: not known. An agent that has not
    seen a start yet judges by it whether ranks hang in their first steps."""
    sources: dict[NodeId, Source] = field(default_factory=dict)
    """For each member whose own memory lacks `resume_step`: the copy in another node's memory from which it fetches its part, if there is
    one."""
    holders: dict[NodeId, NodeId] = field(default_factory=dict)
    """For each member: the node that holds copies of its snapshots. A holder half the ring away is not listed (`buddy_sources.holder`)."""
    new: tuple[NodeId, ...] = ()
    """In GATHER: members that did not belong to the last generation whose ranks may have started."""
    left: tuple[NodeId, ...] = ()
    """In GATHER: members of that last generation that are no longer members (`rank_assignment.elders`)."""
    dismissed: tuple[str, ...] = ()
    """Instances of drained agents, which exit as soon as the job continues without them."""

    @property
    def settled(self) -> bool:
        """Whether the phases GATHER and LAUNCH are over."""
        return self.phase not in (Phase.GATHER, Phase.LAUNCH)

    @property
    def lets_go(self) -> bool:
        """Whether dismissed agents may exit: the job continues without them, or no rank runs."""
        return self.settled or self.idle

    def pauses(self, now: float) -> bool:
        """Whether the ranks must not start yet. now: wall-clock seconds of the present leader. If its clock differs from the earlier
        leader's, the pause ends sooner or lasts up to twice as long."""
        return abs(now - self.opened_s) < self.pause_s

    @property
    def idle(self) -> bool:
        """Whether no rank runs and the next start is delayed, because starts fail."""
        return self.phase is Phase.GATHER and self.pause_s > 0

    @property
    def signal(self) -> int:
        """In ENDING: the number of the signal that told the job to end; 0: no signal did."""
        return max(0, self.exit_code - 128)

    @property
    def over(self) -> bool:
        """Whether the job has ended or is ending."""
        return self.phase in (Phase.ENDING, Phase.ENDED)

    @property
    def waits(self) -> bool:
        """Whether the ranks must wait at their next boundary."""
        return self.paused or bool(self.moving)

    @property
    def saves(self) -> str:
        """Name of the move or request that needs a snapshot on disk; empty: none does."""
        return f"move {self.moving_s} {self.moving_after}" if self.moving else self.snapshot

    def node_rank(self, node: NodeId) -> int:
        """The torchrun node rank of `node`. Raises ValueError if the node is not a member."""
        return list(self.members).index(node)


@dataclass(frozen=True, kw_only=True)
class Quarantine:
    """The quarantine of a node, which must not train until `until_s`."""

    reason: str
    until_s: float
    """When the quarantine ends, in wall-clock seconds."""
    readmitted_s: float = 0.0
    """Wall-clock time at which an operator readmitted the node: earlier faults no longer count. 0: never."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Everything that the controller decides in one tick."""

    record: GenerationRecord | None = None
    """The record that replaces the World's record by compare-and-swap; None: the record does not change."""
    incidents: tuple[Incident, ...] = ()
    """New or changed incidents."""
    answers: dict[str, Answer] = field(default_factory=dict)
    """Answers to requests, by the request's id."""
    reason: str = ""
    said: str = ""
    """A sentence for people: what the ranks were told to do for a request, or from which state a generation resumes."""
    quarantine: dict[NodeId, Quarantine] = field(default_factory=dict)
    """Changed quarantines: of nodes that are quarantined or readmitted now."""

    def __bool__(self) -> bool:
        """Whether anything was decided."""
        return self != Decision()


def answered(request: Request, sentence: str, step: int = -1, exit_code: int = 0) -> Decision:
    """Return a decision that only answers `request`."""
    return Decision(answers={request.id: Answer(sentence=sentence, step=Step(step), exit_code=exit_code)})


@dataclass(frozen=True, kw_only=True)
class Seats:
    members: dict[NodeId, str]
    """The members, sorted by node rank, each with its agent's instance."""
    successors: dict[NodeId, NodeId] = field(default_factory=dict)
    """For each lost node: the spare that takes its node rank."""
    dropped: tuple[NodeId, ...] = ()
    """Members that no spare replaces: the job continues with fewer nodes."""
    joined: tuple[NodeId, ...] = ()
    """Nodes that join, so that the job grows."""
    missed: tuple[NodeId, ...] = ()
    """Lost nodes for which the job waits."""
    at_work: bool = False
    """Whether the job waits for members although enough other nodes are present. The members' ranks may still train, and no node that is
    present would end them."""
