"""The records that agents write into the store: their identity, their nodes' state, and how far they have obeyed the generation record."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from .data_windows import Window
from .signals import (
    Complaint,
    InPlaceRewind,
    Mismatch,
    RankExit,
    RankStall,
    Repeated,
    Shortage,
    Sighting,
    Snapshot,
    Straggler,
)
from .types import Generation, Step


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """A complete copy of another node's part of a snapshot, in the memory of the node that reports it."""

    node_rank: int
    """Node rank of the node whose part was copied."""
    nodes: int
    """Number of members when the snapshot was taken."""
    step: Step
    generation: Generation
    rewinds: int
    """How often the ranks had rewound in place in that generation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeStatus:
    """An agent's report about its node. The store keeps one per node. The agent writes it on change and at fixed intervals (`write_rates`).
    An agent without peers writes it every two seconds."""

    generation: Generation
    at_s: float
    min_step: Step = Step(-1)
    max_step: Step = Step(-1)
    alive: int = 0
    """Number of living local ranks."""
    pids: tuple[int, ...] = ()
    """Process ids, sorted by local rank; 0: that rank is not attached (it has not loaded our hook)."""
    attached_s: float = 0.0
    """Wall-clock time when the last local rank attached in this generation; 0 while a rank is missing. The next four fields are such times
    of the following marks."""
    built_s: float = 0.0
    restored_s: float = 0.0
    stepped_s: float = 0.0
    replayed_s: float = 0.0
    repeated: Repeated = Repeated.UNKNOWN
    """Whether the local ranks got the same figures when they computed steps again."""
    finished: bool = False
    """Whether all local ranks left their loop normally and the launcher returned 0."""
    stopped: bool = False
    """Whether all local ranks left their loop normally, but at least one of them before the loop's end."""
    exits: tuple[RankExit, ...] = ()
    observes: bool = False
    """Whether the ranks only observe: they do nothing about faults."""
    launcher_code: int | None = None
    """Exit code of the launcher, once it has ended."""
    rewinds: tuple[InPlaceRewind, ...] = ()
    sightings: tuple[Sighting, ...] = ()
    """The last few findings of this generation on which the ranks did not act."""
    memory_steps: tuple[Step, ...] = ()
    """Steps that every local rank can restore from memory."""
    courses: tuple[tuple[int, ...], ...] = ()
    """For each of `memory_steps`: the generation in which its snapshot was taken, and the number of rewinds in that generation before
    it."""
    copies: tuple[Copy, ...] = ()
    """Copies of other nodes' snapshots in this node's memory."""
    unfetched: tuple[tuple[int, int, int], ...] = ()
    """Copies of its own snapshots that this node could not fetch from the node that holds them: generation, number of rewinds and step of
    each."""
    durable_steps: tuple[Step, ...] = ()
    """The newest steps with a complete snapshot on disk that this node can read."""
    durable_courses: tuple[tuple[int, ...], ...] = ()
    """As `courses`, for `durable_steps`. If a step has several snapshots on disk, this is the newest lineage's."""
    storage: bool = True
    """Whether the directory or object store for snapshots is there."""
    rejected_steps: tuple[Step, ...] = ()
    """Steps whose snapshot on disk is complete, but is set aside: it is wrong, or the ranks went back behind it."""
    left: str = ""
    """The pending order's `RewindOrder.left`, if this node sees that snapshot and its state is good."""
    launch: str = ""
    """How the ranks of this generation were started: `warm`, or `cold: ` and the reason."""
    stalls: tuple[RankStall, ...] = ()
    """Reports on all living ranks, while all of them have been silent for too long."""
    warmup_s: float = 0.0
    """The longest silence of a local rank before and during its first steps, in seconds, in the last start whose first steps are over; 0:
    there was none."""
    stragglers: tuple[Straggler, ...] = ()
    """Local ranks that are slower than their peers now."""
    shortage: Shortage | None = None
    """Set while the node's memory runs out."""
    complaints: tuple[Complaint, ...] = ()
    """Complaints of devices since this agent started, each once."""
    agreed_steps: tuple[Step, ...] = ()
    """Steps in memory and on disk whose replicas were compared and held the same bits, and steps that have no replicas."""
    compared: int = 0
    """Number of tensors that several local ranks hold alike, and that this agent compares; 0: `agreed_steps` proves nothing."""
    certified_steps: tuple[Step, ...] = ()
    """Steps of `agreed_steps` that were followed by many later steps, and steps that are marked as certified on disk."""
    mismatches: tuple[Mismatch, ...] = ()
    """The last few mismatches of replicas since this agent started."""
    held: str = ""
    """Fingerprints of this node's ranks at the last snapshots. The leader compares them with other nodes' (`signals.Held`)."""
    frozen: Step = Step(-1)
    """Step since which no parameter has changed although many steps completed; -1: parameters change."""
    paused: bool = False
    """Whether all local ranks wait at a boundary because of a pause."""
    declined: int = 0
    """Number of the last rewind order that the ranks could not obey, because they no longer have the state."""
    skips: bool = False
    """Whether the loop or Session of each local rank can skip data."""
    other_data: bool = False
    """Whether a loop of a local rank takes data that no recovery can put back."""
    unsaved: str = ""
    """Why a local rank's state could not be saved for a restart at the last attempt; empty: it could."""
    snapshot: str = ""
    """Id of the last snapshot request that the agent forwarded to the ranks."""
    snapshot_step: Step = Step(-1)
    """Step of the first snapshot that all local ranks have begun since that request; -1: none yet. If this snapshot fails, the ranks take a
    later one."""
    pulse_s: float = 0.0
    """With several nodes: wall-clock time at which the agent last saw all local ranks finish a step, or start, in this generation."""
    stride_s: float = 0.0
    """The longest recent time between two values of `pulse_s`, in seconds."""
    often_s: float = 0.0
    """The longest time between two statuses of this node, in seconds."""
    drained: bool = False
    """Whether this is the node's last status: its agent has exited, and the job continues without it."""
    seat: tuple[int, ...] = ()
    """Node rank and number of nodes with which the snapshots in memory were taken; empty: no ranks have run yet."""

    def kept(self, avoid: Collection[Step] = ()) -> set[Snapshot]:
        """Return the snapshots that this node holds in memory or can read from disk. avoid: steps on disk that storage did not return."""
        return self.remembered() | {
            each for each in _snapshots(self.durable_steps, self.durable_courses) if each[-1] not in avoid
        }

    def remembered(self) -> set[Snapshot]:
        """Return the snapshots that this node holds in memory."""
        return {*_snapshots(self.memory_steps, self.courses)}


def _snapshots(steps: Sequence[Step], courses: Sequence[tuple[int, ...]]) -> Iterator[Snapshot]:
    """Return the snapshot of each step. A step whose lineage is not reported stands alone in the tuple."""
    return ((*(courses[at] if at < len(courses) else ()), step) for at, step in enumerate(steps))


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRecord:
    """A living agent. The store deletes this entry when the agent's lease ends."""

    instance: str
    """An id, new at each start of an agent. A restarted agent has none of the earlier agent's ranks."""
    host: str
    pid: int
    ranks: int
    """Number of training processes on this node."""
    address: str = "127.0.0.1"
    """Address at which the other nodes reach this node."""
    port: int = 0
    """Port to which a neighbour node keeps a connection open (`agent/peers/liveness_link.py`)."""
    metrics_port: int = 0
    """Port of /metrics on this node; 0: not known."""
    copies_port: int = 0
    """Port at which this node receives and serves copies of snapshots (`agent/buddy/service.py`); 0: none."""
    home: str = ""
    """Distinguishes this node from another node with the same name: the host's boot, and the run directory with its inode."""
    fit: str = ""
    """A sentence about a failed preflight check: such a node must not train. Empty: no check failed."""
    labels: dict[str, str] = field(default_factory=dict)
    """The node's labels, such as `rack` for `buddy_placement`."""
    hosts_etcd: bool = False
    """This agent runs the etcd of all nodes, which ends with this agent."""


class AckKind(StrEnum):
    READY = "ready"
    """Nothing of an older generation is left on this node."""
    RUNNING = "running"
    """All local ranks are attached (have loaded our hook)."""
    ENDED = "ended"
    """The worker group is gone, and the last snapshot is written to disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ack:
    kind: AckKind
    generation: Generation
    instance: str
    at_s: float
    port: int = 0
    """A free port on this node. The port of node rank 0 becomes the generation's master port."""


@dataclass(frozen=True, kw_only=True)
class Death:
    """A neighbour's report that an agent is dead, although the agent's lease has not expired."""

    at_s: float


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The job's description. The first agent writes it if the store has none."""

    command: tuple[str, ...]
    sizes: tuple[int, ...] = (1,)
    """Numbers of nodes on which the job may train, ascending."""
    asked: tuple[int, ...] = ()
    """Numbers of nodes that the command names. Some of them may not be able to hold the script's layout."""
    layouts: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """By number of nodes: further arguments of the script, if that number of nodes cannot hold the script's own layout. All agents use the
    first agent's arguments."""
    spares: int = 0
    """Number of additional nodes that are expected."""
    ranks: int = 0
    """Number of ranks on each node."""
    run: str = ""
    """Eight hexadecimal digits in the names of the job's snapshots. A new description of the job gets other digits."""
    first_generation: Generation = Generation(1)
    """The first generation since the job was last started. The number must be greater than the generations of older snapshots, which may
    exist although etcd's data is gone."""
    given_up: Generation = Generation(0)
    """Generations up to this number have left nothing but snapshots on disk, because an operator gave the command again when no agent of
    the job was running. The next generation gets a greater number."""
    windows: tuple[Window, ...] = ()
    """Batches that the job skipped before it was last started. The job skips these batches again, from whichever step it starts now."""
    alike: dict[str, str] = field(default_factory=dict)
    """Other settings that must be equal on all nodes, if they differ from the default (`agent/join/config_match.py`)."""

    @property
    def nodes(self) -> int:
        """Number of all expected nodes, spares included."""
        return max(self.sizes) + self.spares
