"""What agents write into the store: who they are, how their nodes are, how far they are with what the record asks for."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from .data_windows import Window
from .signals import Complaint, InPlaceRewind, Mismatch, RankExit, RankStall, Repeated, Shortage, Sighting, Straggler
from .types import Generation, Step


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """A snapshot of another node's ranks in the memory of the one that says so, whole."""

    node_rank: int
    """Of these ranks,"""
    nodes: int
    """among so many nodes."""
    step: Step
    generation: Generation
    rewinds: int
    """How often the ranks had gone back in that generation."""


@dataclass(frozen=True, kw_only=True, slots=True)
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
    repeated: Repeated = Repeated.UNKNOWN
    """What the local ranks found when they computed steps again."""
    finished: bool = False
    """All local ranks left their loop in order and the launcher returned 0."""
    stopped: bool = False
    """They left it before its end."""
    exits: tuple[RankExit, ...] = ()
    observes: bool = False
    """Nothing is done about faults here."""
    launcher_code: int | None = None
    """Exit code of the launcher, once it has ended."""
    rewinds: tuple[InPlaceRewind, ...] = ()
    sightings: tuple[Sighting, ...] = ()
    """The last few of this generation, where ranks only observe."""
    memory_steps: tuple[Step, ...] = ()
    """Steps that every local rank can restore from the arena,"""
    courses: tuple[tuple[int, ...], ...] = ()
    """and of each the generation and the number of rewinds in which it was taken."""
    copies: tuple[Copy, ...] = ()
    """Of another node's snapshots."""
    unfetched: tuple[tuple[int, int, int], ...] = ()
    """Those of its own that this node could not have from who holds them: generation, number of rewinds and step."""
    durable_steps: tuple[Step, ...] = ()
    """Newest committed steps that this node can read."""
    storage: bool = True
    """Whether the directory of the durable snapshots is there."""
    rejected_steps: tuple[Step, ...] = ()
    """Those that were committed and then set aside, because a rank could not restore them."""
    launch: str = ""
    """How this generation was started: `warm`, or `cold: why`."""
    stalls: tuple[RankStall, ...] = ()
    """All living ranks, while all of them are silent for too long."""
    stragglers: tuple[Straggler, ...] = ()
    """Local ranks that are slower than their peers now."""
    shortage: Shortage | None = None
    """While memory runs out."""
    complaints: tuple[Complaint, ...] = ()
    """Of this agent's life, each once."""
    agreed_steps: tuple[Step, ...] = ()
    """Of the steps in memory and on disk, those whose replicas have been compared and agreed (or that have no replicas)."""
    certified_steps: tuple[Step, ...] = ()
    """Those of them that many later steps have followed, and what is marked so on disk."""
    mismatches: tuple[Mismatch, ...] = ()
    """Of this agent's life, the last few."""
    held: str = ""
    """What its ranks held at the last snapshots, for whoever leads to compare with other nodes' (`signals.Held`)."""
    frozen: Step = Step(-1)
    """Step since which no parameter has changed, while many were done; -1: they change."""
    paused: bool = False
    """All local ranks wait at a boundary, as ordered."""
    declined: int = 0
    """Number of the last rewind that was ordered and that the ranks could not do: the state is not there any more."""
    skips: bool = False
    """The script is known to be able to leave data out."""
    snapshot: str = ""
    """The last request for a snapshot that the ranks were told of,"""
    snapshot_step: Step = Step(-1)
    """and the step at which they have begun one since; -1: not yet. Where that one fails, a later one is tried."""
    pulse_s: float = 0.0
    """With several nodes: wall-clock time at which all local ranks were last seen to have finished a step in this generation, or begun,"""
    stride_s: float = 0.0
    """the longest time between two such moments, of late,"""
    often_s: float = 0.0
    """and so often, at the least, the node says how it is."""
    drained: bool = False
    """Its agent has left, and the job goes on without it: its last word."""
    seat: tuple[int, ...] = ()
    """Node rank, and number of nodes, of the ranks whose state memory holds; empty: there were none yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRecord:
    """An agent is alive: bound to its lease."""

    instance: str
    """Unique for each start of an agent: a restarted agent has none of its predecessor's ranks."""
    host: str
    pid: int
    ranks: int
    """Training processes on this node."""
    address: str = "127.0.0.1"
    """Where the other nodes reach this one."""
    port: int = 0
    """Where its neighbour holds a connection to it (`agent/peers/liveness_link.py`)."""
    copies_port: int = 0
    """Where copies of snapshots are taken and given (`agent/buddy/service.py`); 0: nowhere."""
    home: str = ""
    """What tells the holder of this name from another who claims it: the host's boot, and the run directory, with its inode."""
    fit: str = ""
    """Why it is not to be used, a sentence: a check before it joined has failed; empty: none has."""
    labels: dict[str, str] = field(default_factory=dict)
    """What is said of it: `rack` for `buddy_placement`."""


class AckKind(StrEnum):
    READY = "ready"
    """Nothing of an older generation is left on this node."""
    RUNNING = "running"
    """All local ranks are attached."""
    ENDED = "ended"
    """The worker group is gone, the last snapshot is drained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ack:
    kind: AckKind
    generation: Generation
    instance: str
    at_s: float
    port: int = 0
    """A free port on this node: node rank 0's becomes the generation's master port."""


@dataclass(frozen=True, kw_only=True)
class Death:
    """An agent is dead although its lease lives: its neighbour says so."""

    at_s: float


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What the job is; the first agent writes it, put-if-absent."""

    command: tuple[str, ...]
    sizes: tuple[int, ...] = (1,)
    """Numbers of nodes that it may train on, ascending."""
    spares: int = 0
    """Nodes beyond that are expected."""
    ranks: int = 0
    """On each node."""
    run: str = ""
    """Eight hexadecimal digits, in the names of its snapshots: a job that is described anew has others."""
    first_generation: Generation = Generation(1)
    """Snapshots of an earlier life of the job may be there although its etcd data are not: generations must grow all the same."""
    given_up: Generation = Generation(0)
    """Nothing is left of the generations up to this one, but what is on disk: somebody gave the command again when none of its agents was
    there. The next one has a greater number."""
    windows: tuple[Window, ...] = ()
    """Batches that earlier lives of the job have left out: they stay out, wherever this one begins."""
    alike: dict[str, str] = field(default_factory=dict)
    """What else all nodes have to be told alike, as far as it is not the default (`agent/join/config_match.py`)."""

    @property
    def nodes(self) -> int:
        """That are expected in all, spares included."""
        return max(self.sizes) + self.spares
