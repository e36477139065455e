"""Facts: what agents report and people ask for. Frozen words that every judgement is made of; no judgement in here."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NewType

from .windows import Window

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


class Doing(IntEnum):
    """What a rank does between two boundaries that may take longer than a step, as it says itself on the board."""

    STEP = 0
    """Nothing of the kind."""
    EVALUATION = 1
    CHECKPOINT = 2
    """The script writes a checkpoint of its own."""
    PAUSED = 3
    """It waits at a boundary, since a pause is ordered, and beats meanwhile."""


class Order(IntEnum):
    """What the agent asks of its ranks through the board. Ranks agree on it by MAX, so a larger value wins."""

    NONE = 0
    STOP = 1
    """Leave at the next boundary."""
    SNAPSHOT_AND_STOP = 2
    """Stage a durable snapshot at the next boundary, then leave."""


class OrderedBy(StrEnum):
    """Why ranks go back that have found nothing wrong themselves."""

    OPERATOR = "ordered"
    """Somebody wants it."""
    COMPARISON = "fingerprint_mismatch"
    """Replicas have gone apart."""


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
    out_of_memory: bool = False
    """The kernel killed it for want of memory."""
    started: bool = False
    """Whether it had finished a step in this generation."""
    kind: str = "exit"
    """`exit`, or what the rank itself named as its end: a `spikes.Kind`, `snapshot` (damaged), `unreadable` (a snapshot, now); or `fenced`:
    its own agent has ended it."""
    step: Step = Step(-1)
    """The step that such an end is about."""


class Place(StrEnum):
    """Where the main thread of a rank stands, as far as it says whether the rank waits for others."""

    HALTED = "halted"
    """It cannot move: stopped by a signal, stuck in the kernel, or its interpreter has not come up."""
    ELSEWHERE = "elsewhere"
    """In the script, or a library: at work, or hanging by itself."""
    DATA = "data"
    """It waits for its data loader."""
    PERHAPS = "perhaps"
    """A backward pass, a wait for the device, or it gives no stack: there may be a collective in it."""
    COLLECTIVE = "collective"
    """All ranks of a group come here together, so one that is elsewhere is missing."""
    EXCHANGE = "exchange"
    """It waits for others, but not all come to the same place: send and receive, a rendezvous."""
    BOUNDARY = "boundary"
    """It waits at our own boundary."""
    TEARDOWN = "teardown"
    """It puts its process groups away, or its interpreter."""


@dataclass(frozen=True, kw_only=True)
class RankStall:
    """A rank that has been silent for longer than it may be, and what two looks at it have shown. A status has all living ranks of its
    node, or none: which of them holds up the others can be told from all together (`hang.judge`)."""

    rank: Rank
    at_s: float
    """Wall-clock seconds of its last sign of life."""
    silent_s: float
    """How long that was ago at the second look, in time in which the agent was awake."""
    budget_s: float
    """How long it might have been."""
    stage: str
    """What that budget is for: `start`, `step`, `evaluation`, `checkpoint`, `tail`."""
    step: Step
    """Steps it had done; -1: none in this generation."""
    place: Place
    words: str
    """What it does there: `in all_reduce, train.py line 31 in main`."""
    site: str = ""
    """The line of the script that has led there."""
    moved: bool = False
    """Whether it stood elsewhere at the first look."""
    busy: bool = False
    """Whether it has used the processor or the disk between the two."""
    why: str = ""
    """What has shown the last two."""
    started: bool = False
    """Whether it had finished a step in this generation."""
    stacks: str = ""
    """File with the stacks of all its threads."""


@dataclass(frozen=True, kw_only=True)
class InPlaceRewind:
    """A rewind that the ranks did, as the agent reports it: of their own accord or by order, in the same processes but where an order had
    to wait for the next ones."""

    ordinal: int
    """Counted from 1 within the generation."""
    generation: Generation
    cause: str
    onset: Step
    """First step whose figures were wrong."""
    to: Step
    reached: Step
    """Newest step finished when the ranks turned back."""
    remedy: str
    """What they did besides going back (`ladder.Remedy`)."""
    window: Window | None = None
    """Batches that they leave out from now on."""
    value: float = 0.0
    """The figure that was wrong,"""
    expected: float = 0.0
    """and what was to be expected."""
    order: int = 0
    """Number of the order that it obeys; 0: the ranks' own judgement."""
    ranks: tuple[Rank, ...] = ()
    """Ranks whose own gradient, before the ranks' were added up, was out of line with what it usually is, while that of others was not."""
    at_s: float
    restore_s: float


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """What the ranks have found wrong with their figures while they observe only: told once per fault, and they went on."""

    ordinal: int
    """Counted from 1 within the generation."""
    generation: Generation
    cause: str
    onset: Step
    """First step whose figures were wrong."""
    seen: Step
    """The step at which it was found,"""
    last: Step
    """and the newest one at which it still was."""
    to: Step
    """Where the ranks would have gone back to; -1: nowhere, nothing would have helped or nothing is kept."""
    remedy: str
    """What they would have done besides (`ladder.Remedy`)."""
    window: Window | None = None
    value: float = 0.0
    """The figure that was wrong,"""
    expected: float = 0.0
    """and what was to be expected."""
    at_s: float


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """Memory of a node is about to run out."""

    at_s: float
    left_bytes: int
    """Of the machine, or of the tightest control group,"""
    lasts_s: float
    """which at the present rate last so long."""
    per_s: int
    """Bytes a second that are lost,"""
    grows: str
    """most of them to this process: `rank 1`; empty: not known."""
    grows_per_s: int


@dataclass(frozen=True, kw_only=True)
class Complaint:
    """A device, or its driver, says that something is wrong with it."""

    device: str
    words: str
    at_s: float
    step: int
    """Newest step done when that was seen; -1: none."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank whose steps take longer than its peers' and than its own did: by its own time, without waiting for anybody."""

    rank: Rank
    at_s: float
    step: Step
    """Newest step done when that was certain."""
    own_s: float
    """What a step takes it,"""
    peers_s: float
    """and its peers, in the median."""
    usual: float
    """The ratio of the two, as it was before."""
    lost: str
    """Where the further time goes (`straggler.Lost`)."""


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
    unfetched: tuple[Step, ...] = ()
    """Those of its own that this node could not have from who holds them."""
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
    """Where its neighbour holds a connection to it (`agent/neighbour.py`)."""
    copies_port: int = 0
    """Where copies of snapshots are taken and given (`agent/buddy.py`); 0: nowhere."""
    home: str = ""
    """What tells the holder of this name from another who claims it: the host's boot, and the run directory."""
    since_s: float = 0.0
    """Wall-clock time at which it joined."""
    fit: str = ""
    """Why it is not to be used, a sentence: a check before it joined has failed; empty: none has."""
    labels: dict[str, str] = field(default_factory=dict)
    """What is said of it: `rack` for `buddies`."""


class AckKind(StrEnum):
    READY = "ready"
    """Nothing of an older generation is left on this node."""
    RUNNING = "running"
    """All local ranks are attached."""
    ENDED = "ended"
    """The gang is gone, the last snapshot is drained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ack:
    kind: AckKind
    generation: Generation
    instance: str
    at_s: float
    port: int = 0
    """A free port on this node: node rank 0's becomes the generation's master port."""


class Wish(StrEnum):
    """What an operator may ask for."""

    STOP = "stop"
    DRAIN = "drain"
    """Take a snapshot, then leave the node."""
    REWIND = "rewind"
    PAUSE = "pause"
    RESUME = "resume"
    SNAPSHOT = "snapshot"


@dataclass(frozen=True, kw_only=True)
class Request:
    """An operator's order, put into the store by a command or by the agent that got a signal; it stands until it is answered."""

    kind: str
    """A `Wish`; another program's word is refused, not an error."""
    id: str = ""
    """The key, in the order of time."""
    step: Step = Step(-1)
    """With REWIND: where to,"""
    skip: int = 0
    """and how many batches after it are left out."""
    node: str = ""
    """With DRAIN."""
    snapshot: bool = False
    """With STOP: whether to take a last snapshot first,"""
    budget_s: float = 0.0
    """and how long that may take from `at_s` on, until it is over; 0: as long as the configuration says."""
    exit_code: int = 0
    at_s: float = 0.0
    by: str = ""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What has become of a request, for whoever waits for it. Written once."""

    sentence: str
    exit_code: int = 0
    """0: it is done."""
    step: Step = Step(-1)
    """That it was about: restored, on disk, reached."""


@dataclass(frozen=True, kw_only=True)
class Death:
    """An agent is dead although its lease lives: its neighbour says so."""

    at_s: float


@dataclass(frozen=True, kw_only=True)
class Quarantine:
    """A node is not to train, although it is there."""

    reason: str
    until_s: float
    """Wall-clock seconds."""
    instance: str = ""
    """As long as this agent runs; empty: whichever does."""


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
    created_s: float = 0.0
    first_generation: Generation = Generation(1)
    """Snapshots of an earlier life of the job may be there although its etcd data are not: generations must grow all the same."""
