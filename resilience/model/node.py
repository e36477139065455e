"""What agents write into the store: who they are, the state of their nodes, and how far they have obeyed the record."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from .data_windows import Window
from .signals import Complaint, InPlaceRewind, Mismatch, RankExit, RankStall, Repeated, Shortage, Sighting, Straggler
from .types import Generation, Step


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """A complete snapshot of another node's ranks, in the memory of the node that reports it."""

    node_rank: int
    """Node rank of the node whose ranks these are."""
    nodes: int
    """Number of members at that time."""
    step: Step
    generation: Generation
    rewinds: int
    """How often the ranks had gone back in that generation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeStatus:
    """What an agent reports about its node: one value per node, written on change and at a steady pace (`write_rates`). An agent without
    peers writes it every two seconds."""

    generation: Generation
    at_s: float
    min_step: Step = Step(-1)
    max_step: Step = Step(-1)
    alive: int = 0
    """Number of living local ranks."""
    pids: tuple[int, ...] = ()
    """Process ids by local rank; 0: that rank is not attached."""
    attached_s: float = 0.0
    """Wall-clock time when the last local rank attached in this generation; 0 while one is missing. The next four times are alike."""
    built_s: float = 0.0
    restored_s: float = 0.0
    stepped_s: float = 0.0
    replayed_s: float = 0.0
    repeated: Repeated = Repeated.UNKNOWN
    """Whether the local ranks got the same figures when they computed steps again."""
    finished: bool = False
    """All local ranks left their loop in order and the launcher returned 0."""
    stopped: bool = False
    """They left in order, but at least one left its loop before its end."""
    exits: tuple[RankExit, ...] = ()
    observes: bool = False
    """The ranks only observe: they do nothing about faults."""
    launcher_code: int | None = None
    """Exit code of the launcher, once it has ended."""
    rewinds: tuple[InPlaceRewind, ...] = ()
    sightings: tuple[Sighting, ...] = ()
    """The last few faults of this generation, if the ranks only observe."""
    memory_steps: tuple[Step, ...] = ()
    """Steps that every local rank can restore from memory."""
    courses: tuple[tuple[int, ...], ...] = ()
    """For each of `memory_steps`: the generation and the number of rewinds at which its snapshot was taken."""
    copies: tuple[Copy, ...] = ()
    """Copies of other nodes' snapshots."""
    unfetched: tuple[tuple[int, int, int], ...] = ()
    """Copies of its own snapshots that this node could not fetch from their holder: generation, number of rewinds and step."""
    durable_steps: tuple[Step, ...] = ()
    """Newest committed steps that this node can read."""
    storage: bool = True
    """Whether the place of the snapshots on disk is there."""
    rejected_steps: tuple[Step, ...] = ()
    """Steps that were committed and then set aside, because a rank could not restore them."""
    launch: str = ""
    """How this generation was started: `warm`, or `cold: why`."""
    stalls: tuple[RankStall, ...] = ()
    """All living ranks, while all of them are silent for too long."""
    stragglers: tuple[Straggler, ...] = ()
    """Local ranks that are slower than their peers now."""
    shortage: Shortage | None = None
    """Set while memory runs out."""
    complaints: tuple[Complaint, ...] = ()
    """Complaints since this agent started, each once."""
    agreed_steps: tuple[Step, ...] = ()
    """Of the steps in memory and on disk, those whose replicas have been compared and agreed (or that have no replicas)."""
    certified_steps: tuple[Step, ...] = ()
    """Those of `agreed_steps` that many later steps have followed, and those that are marked as certified on disk."""
    mismatches: tuple[Mismatch, ...] = ()
    """The last few mismatches since this agent started."""
    held: str = ""
    """What its ranks held at the last snapshots. The leader compares it with other nodes' (`signals.Held`)."""
    frozen: Step = Step(-1)
    """Step since which no parameter has changed although many steps completed; -1: parameters change."""
    paused: bool = False
    """All local ranks wait at a boundary, as ordered."""
    declined: int = 0
    """Number of the last rewind order that the ranks could not obey, because the state is gone."""
    skips: bool = False
    """The loop or Session of each local rank can leave data out."""
    snapshot: str = ""
    """Id of the last snapshot request that the agent passed on to the ranks."""
    snapshot_step: Step = Step(-1)
    """Step of the first snapshot that they have all begun since; -1: none yet. If it fails, they try a later one."""
    pulse_s: float = 0.0
    """With several nodes: wall-clock time at which the agent last saw all local ranks finish a step, or start, in this generation."""
    stride_s: float = 0.0
    """The longest recent time between two such moments."""
    often_s: float = 0.0
    """The longest time between two statuses of this node."""
    drained: bool = False
    """Its agent has left, and the job goes on without it. This is its last status."""
    seat: tuple[int, ...] = ()
    """Node rank and number of nodes of the ranks whose state memory holds; empty: there were no ranks yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRecord:
    """A living agent. The entry is bound to the agent's lease."""

    instance: str
    """Unique for each start of an agent: a restarted agent has none of its predecessor's ranks."""
    host: str
    pid: int
    ranks: int
    """Number of training processes on this node."""
    address: str = "127.0.0.1"
    """Where the other nodes reach this one."""
    port: int = 0
    """Port to which its neighbour keeps a connection open (`agent/peers/liveness_link.py`)."""
    copies_port: int = 0
    """Port at which it takes and gives copies of snapshots (`agent/buddy/service.py`); 0: none."""
    home: str = ""
    """Tells this node from another node with the same name: the host's boot, and the run directory with its inode."""
    fit: str = ""
    """A sentence: the preflight check that failed, so that the node must not train; empty: none failed."""
    labels: dict[str, str] = field(default_factory=dict)
    """The node's labels, such as `rack` for `buddy_placement`."""


class AckKind(StrEnum):
    READY = "ready"
    """Nothing of an older generation is left on this node."""
    RUNNING = "running"
    """All local ranks are attached."""
    ENDED = "ended"
    """The worker group is gone, and the last snapshot is written out."""


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
    """The report of a neighbour that an agent is dead, although its lease has not expired."""

    at_s: float


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The job's description. The first agent writes it if it is absent."""

    command: tuple[str, ...]
    sizes: tuple[int, ...] = (1,)
    """Numbers of nodes on which the job may train, ascending."""
    spares: int = 0
    """Number of further nodes that are expected."""
    ranks: int = 0
    """Number of ranks on each node."""
    run: str = ""
    """Eight hexadecimal digits in the names of the job's snapshots. A job that is described anew gets other digits."""
    first_generation: Generation = Generation(1)
    """The first generation since the job was last started. Older snapshots may exist although etcd's data is gone, so the number must
    be greater than theirs."""
    given_up: Generation = Generation(0)
    """Only what is on disk is left of the generations up to this one: an operator gave the command again when none of the job's agents was
    there. The next generation gets a greater number."""
    windows: tuple[Window, ...] = ()
    """Batches that the job left out before it was last started. They stay out, from whichever step it begins now."""
    alike: dict[str, str] = field(default_factory=dict)
    """Further settings that must be equal on all nodes, if they differ from the default (`agent/join/config_match.py`)."""

    @property
    def nodes(self) -> int:
        """Number of nodes that are expected in all, spares included."""
        return max(self.sizes) + self.spares
