"""Facts: what agents report and people ask for. Frozen words that every judgement is made of; no judgement in here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NewType

NodeId = NewType("NodeId", str)
Rank = NewType("Rank", int)
"""Global rank of a training process, 0 to world size - 1."""
Step = NewType("Step", int)
"""Number of optimizer steps done: the state *after* that many. Step 0 is the initial state."""
Generation = NewType("Generation", int)
"""One life of the gang, counted from 1. It fences every order, page, slot and manifest: what carries an older one is refused."""


class RankPhase(IntEnum):
    """Where a rank is in its life, as it says itself on the board. The order is the order of a life."""

    ABSENT = 0
    ATTACHED = 1
    """The interpreter is up and our hook is in it; imports and model construction follow."""
    RESTORING = 2
    TRAINING = 3
    FINISHED = 4
    """The loop reached its end; only the script's own tail is left."""
    STOPPED = 5
    """Left the loop at a boundary before its end: ordered to, or by the script's own will."""


class Order(IntEnum):
    """What the agent asks of its ranks through the board. Ranks agree on it by MAX, so a larger value wins."""

    NONE = 0
    STOP = 1
    """Leave at the next boundary."""
    SNAPSHOT_AND_STOP = 2
    """Stage a durable snapshot at the next boundary, then leave."""


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """A rank that is gone although its loop was not over."""

    rank: Rank
    at_s: float
    """Wall-clock seconds when the agent saw it."""
    code: int | None = None
    """Exit code; negative for the signal that killed it; None where the kernel does not tell."""
    error: str = ""
    """Last line of the rank's own traceback, empty when it died without a word."""
    traceback: str = ""
    started: bool = False
    """Whether it had finished a step in this generation."""
    kind: str = "exit"
    """`exit`, or what the rank itself named as its end: `non_finite`, `snapshot` (damaged), `unreadable` (a snapshot, now)."""
    step: Step = Step(-1)
    """The step that such an end is about."""


@dataclass(frozen=True, kw_only=True)
class InPlaceRewind:
    """A rewind that the ranks did among themselves, with no process restarted; the agent only reports it."""

    ordinal: int
    """Counted from 1 within the generation."""
    generation: Generation
    onset: Step
    """First step whose figures were not finite."""
    to: Step
    reached: Step
    """Newest step finished when the ranks turned back."""
    at_s: float
    restore_s: float
    cause: str = "non_finite"


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Replicas that held the same bits, and did not any more when they were compared."""

    generation: Generation
    """In which it was found; the ranks may be those of the one before."""
    onset: Step
    """First step that was found wrong."""
    agreed: Step
    """Last step before it that was found right; -1: none."""
    tensors: tuple[str, ...]
    """What differs: the first few,"""
    count: int
    """and how many in all."""
    ranks: tuple[Rank, ...]
    """That should hold the same,"""
    wrong: tuple[Rank, ...] = ()
    """and of these the ones that are known to be wrong; none: two copies, or as many of each sort."""
    replayed: bool = False
    """It took computing the step again to know who was wrong."""
    at_s: float


@dataclass(frozen=True, kw_only=True)
class NodeStatus:
    """What an agent says about its node: one value per node, written on change and every two seconds."""

    generation: Generation
    at_s: float
    min_step: Step = Step(-1)
    max_step: Step = Step(-1)
    alive: int = 0
    """Local ranks alive."""
    pids: tuple[int, ...] = ()
    """Of the local ranks, by local rank; 0 for one that is not attached."""
    attached_s: float = 0.0
    """Wall-clock time when the last local rank attached in this generation; 0 while one is missing. Likewise the next four."""
    built_s: float = 0.0
    restored_s: float = 0.0
    stepped_s: float = 0.0
    replayed_s: float = 0.0
    finished: bool = False
    """All local ranks left their loop in order and the launcher returned 0."""
    stopped: bool = False
    """They left it before its end."""
    exits: tuple[RankExit, ...] = ()
    rewinds: tuple[InPlaceRewind, ...] = ()
    memory_steps: tuple[Step, ...] = ()
    """Steps that every local rank can restore from the arena."""
    durable_steps: tuple[Step, ...] = ()
    """Newest committed steps that this node can read."""
    storage: bool = True
    """Whether the directory of the durable snapshots is there."""
    rejected_steps: tuple[Step, ...] = ()
    """Those that were committed and then set aside, because a rank could not restore them."""
    launch: str = ""
    """How this generation was started: `warm`, or `cold: why`."""
    agreed_steps: tuple[Step, ...] = ()
    """Of the steps in memory and on disk, those whose replicas have been compared and agreed (or that have no replicas)."""
    certified_steps: tuple[Step, ...] = ()
    """Those of them that many later steps have followed, and what is marked so on disk."""
    mismatches: tuple[Mismatch, ...] = ()
    """Of this agent's life, the last few."""
    frozen: Step = Step(-1)
    """Step since which no parameter has changed, while many were done; -1: they change."""


@dataclass(frozen=True, kw_only=True)
class NodeRecord:
    """An agent is alive: bound to its lease."""

    instance: str
    """Unique for each start of an agent: a restarted agent has none of its predecessor's ranks."""
    host: str
    pid: int
    ranks: int
    """Training processes on this node."""


class AckKind(StrEnum):
    READY = "ready"
    """Nothing of an older generation is left on this node."""
    RUNNING = "running"
    """All local ranks are attached."""
    ENDED = "ended"
    """The gang is gone, the last snapshot is drained."""


@dataclass(frozen=True, kw_only=True)
class Ack:
    kind: AckKind
    generation: Generation
    instance: str
    at_s: float
    port: int = 0
    """A free port on this node: node rank 0's becomes the generation's master port."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """An operator's order, put into the store by the agent that got the signal."""

    kind: str
    """`stop`."""
    snapshot: bool = False
    """Whether to take a last snapshot first."""
    exit_code: int = 0
    at_s: float = 0.0
    by: str = ""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What the job is; the first agent writes it, put-if-absent."""

    command: tuple[str, ...]
    nodes: int = 1
    created_s: float = 0.0
    first_generation: Generation = Generation(1)
    """Snapshots of an earlier life of the job may be there although its etcd data are not: generations must grow all the same."""
