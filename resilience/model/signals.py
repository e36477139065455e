"""Signals: immutable facts that an agent finds out about its ranks and devices. Every decision is based on them; this module decides
nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TypeAlias

from .collectives import GroupCalls
from .data_windows import Window
from .types import Generation, NodeId, Rank, Step


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """A rank whose process is gone and did not end normally."""

    rank: Rank
    at_s: float
    """Wall-clock seconds when the agent saw that the rank was gone."""
    code: int | None = None
    """Exit code; negative: the signal that killed the rank; None: the kernel does not report it."""
    error: str = ""
    """Last line of the rank's own traceback; empty: the rank left no traceback."""
    traceback: str = ""
    last_lines: str = ""
    """What the rank had printed last, if it left no traceback."""
    out_of_memory: bool = False
    """Whether the kernel killed the rank because memory ran out."""
    oom_killer_active: bool = False
    """Whether the kernel had just killed a process for lack of memory, and it is not known which one."""
    started: bool = False
    """Whether the rank had finished a step in this generation."""
    through: bool = False
    """Whether the rank had done all steps, and failed after its loop."""
    kind: str = "exit"
    """`exit`, or the reason that the rank itself gave: a `cause.Kind`, `snapshot` (the snapshot is damaged), `unreadable` (the snapshot
    cannot be read now), `refused` (the snapshot is of something else), `unsavable` (an object given to its Session), `broken` (the script
    is missing, or is no Python). `wrapper`: the process that started the rank ended. `no torch`: the launcher ended. `fenced`, `nonsense`:
    the rank's own agent ended it; for `nonsense`, `error` names the impossible value on the rank's page of shared memory."""
    step: Step = Step(-1)
    """The step to which `kind` applies."""


class Repeated(IntEnum):
    """Whether steps that the ranks computed again on the same data gave the same figures (loss and gradient norm) as before."""

    UNKNOWN = 0
    """The ranks computed no step again, or the step's earlier figures are not known."""
    SAME = 1
    OTHER = 2


class Place(StrEnum):
    """What the main thread of a rank is doing. The place shows whether the rank waits for other ranks."""

    HALTED = "halted"
    """The rank cannot move: a signal stopped it, it is stuck in the kernel, or its interpreter has not started."""
    ELSEWHERE = "elsewhere"
    """The rank runs code of the script or a library: it works, or it hangs without waiting for other ranks."""
    DATA = "data"
    """The rank waits for its data loader."""
    PERHAPS = "perhaps"
    """The rank may be in a collective: it is in a backward pass, it waits for the device, or its stack is unknown."""
    COLLECTIVE = "collective"
    """The rank waits in a collective. A rank of the same group that is not in a collective makes it wait."""
    EXCHANGE = "exchange"
    """The rank waits for ranks that need not make the same call: in send or receive, or in a rendezvous."""
    BOUNDARY = "boundary"
    """The rank waits in our own code between two steps."""
    TEARDOWN = "teardown"
    """The rank destroys its process groups, or shuts its interpreter down."""


OWN_WORK = (Place.ELSEWHERE, Place.DATA)
"""Places at which a rank waits for no other rank."""


class DeviceState(StrEnum):
    """What a silent rank's device does with the work that the rank has queued."""

    UNKNOWN = ""
    """The device works, has nothing to do, or cannot be followed."""
    STUCK = "stuck"
    """The device finishes nothing."""
    DEAD = "dead"
    """The device finishes nothing, not even on a stream that waits for no other work."""


@dataclass(frozen=True, kw_only=True)
class RankStall:
    """A rank that has been silent for longer than its budget, and the results of two inspections. A status reports all living ranks of its
    node, or none: only together they show which rank makes the others wait (`hang_blame.judge`)."""

    rank: Rank
    at_s: float
    """Wall-clock seconds of the rank's last sign of life."""
    silent_s: float
    """Seconds from `at_s` to the second inspection. Only time in which the agent was awake counts."""
    budget_s: float
    """Seconds for which the rank may be silent."""
    stage: str
    """The stage for which `budget_s` holds: `start`, `step`, `evaluation`, `checkpoint`, `tail`."""
    step: Step
    """Steps that the rank had finished; -1: none in this generation."""
    place: Place
    words: str
    """What the main thread does, in words: `in all_reduce, train.py line 31 in main`."""
    site: str = ""
    """The line of the script that called the code in which the main thread is."""
    moved: bool = False
    """Whether the main thread was elsewhere at the first inspection."""
    busy: bool = False
    """Whether the rank used the processor or the disk between the two inspections."""
    why: str = ""
    """The evidence for `moved` and `busy`."""
    started: bool = False
    """Whether the rank had finished a step in this generation."""
    stacks: str = ""
    """File with the stacks of all threads of the rank."""
    device: DeviceState = DeviceState.UNKNOWN
    calls: tuple[GroupCalls, ...] = ()
    """The rank's collectives, if it has a flight recorder of torch."""


@dataclass(frozen=True, kw_only=True)
class WrongSteps:
    """A fault that ranks found in their figures (loss and gradient norm), and what they did about it."""

    ordinal: int
    """The fault's number, counted from 1 within the generation."""
    generation: Generation
    cause: str
    onset: Step
    """First step whose figures were wrong."""
    to: Step
    """Step to which the ranks rewound, or would have rewound."""
    remedy: str
    """What the ranks did besides rewinding (`rewind.Remedy`)."""
    window: Window | None = None
    """Batches that the ranks skip from this rewind on."""
    value: float = 0.0
    """The figure that was wrong."""
    expected: float = 0.0
    """The figure that was expected."""
    at_s: float


@dataclass(frozen=True, kw_only=True)
class InPlaceRewind(WrongSteps):
    """The agent's report of a rewind that the ranks did, by their own decision or by order. The ranks rewound in the same processes. Only
    an order may have been obeyed by new processes."""

    reached: Step
    """Newest step that was finished when the ranks rewound."""
    order: int = 0
    """Number of the order that the ranks obeyed; 0: they decided themselves."""
    ranks: tuple[Rank, ...] = ()
    """Ranks whose own gradient, before it was reduced with the other ranks', was unusual for that rank, while other ranks' gradients were
    usual."""
    restore_s: float


@dataclass(frozen=True, kw_only=True)
class Sighting(WrongSteps):
    """A finding on which the ranks do not act: they only observe, or they wait for the loss to come back. The agent reports it once. `to`
    is the kept state before it, or -1."""

    seen: Step
    """The step at which the ranks found the fault."""
    last: Step
    """The newest step at which the fault was still there; if `outcome` is set, the step at which the watch ended."""
    outcome: int = 0
    """How the watch ended, as a `loss_level.Outcome`."""


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """The report that a node's memory is about to run out."""

    at_s: float
    left_bytes: int
    """Bytes of memory left on the machine, or in the tightest control group."""
    lasts_s: float
    """Seconds until the memory runs out at the present rate."""
    per_s: int
    """Bytes by which the memory left shrinks each second."""
    grows: str
    """The process that takes most of these bytes, such as `rank 1`; empty: not known."""
    grows_per_s: int


@dataclass(frozen=True, kw_only=True)
class Complaint:
    """A report by a device, or its driver, that something is wrong with it."""

    device: str
    words: str
    at_s: float
    step: int
    """Newest step that was done when the agent saw the complaint; -1: none."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank whose steps take longer than its peers' steps and than its own earlier steps. Time in which it waits for other ranks does not
    count."""

    rank: Rank
    at_s: float
    step: Step
    """Newest step that was done when the rank was certainly slow."""
    own_s: float
    """Seconds that a step takes this rank, without waiting."""
    peers_s: float
    """The median of the same time of the rank's peers."""
    usual: float
    """The earlier ratio of `own_s` to `peers_s`; 0: it was no lower."""
    lost: str
    """A `Lost`: where the rank's additional time goes."""


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Replicas that held the same bits earlier, and different bits when they were compared."""

    generation: Generation
    """Generation in which the mismatch was found. The compared ranks may be those of the generation before."""
    onset: Step
    """First compared step at which the replicas differed."""
    agreed: Step
    """Last compared step before `onset` at which they were equal; -1: none."""
    tensors: tuple[str, ...]
    """Names of the first few tensors that differ."""
    count: int
    """Number of all tensors that differ."""
    ranks: tuple[Rank, ...]
    """Ranks that should hold the same bits."""
    wrong: tuple[Rank, ...] = ()
    """Ranks of `ranks` that are known to be wrong; empty: not known, because there are two replicas or no value has a majority."""
    replayed: bool = False
    """Whether the ranks had to compute the step again to show which of them were wrong."""
    at_s: float


Snapshot: TypeAlias = tuple[int, ...]
"""A snapshot's generation, number of rewinds, and step. Such tuples sort by the time at which the snapshots were taken."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """Fingerprints of a node's ranks at the last snapshots that all nodes check: those for the disk or for another node's memory. The text
    form has one word for each snapshot. The leader gets thousands of these texts at a time. Most are equal, and it parses only those that
    differ."""

    model: str
    """A text that is equal on two nodes if each rank of the one is a replica of the corresponding rank of the other."""
    words: Mapping[Snapshot, int]
    """For each snapshot: one fingerprint of the bits of all the node's ranks."""

    def __str__(self) -> str:
        return " ".join((self.model, *(".".join(map(str, (*at, word))) for at, word in sorted(self.words.items()))))

    @classmethod
    def parse(cls, text: str) -> Held:
        model, *words = text.split(" ")
        found = [[*map(int, word.split("."))] for word in words]
        return cls(model=model, words={(*at,): word for *at, word in found})


@dataclass(frozen=True, kw_only=True)
class Parted:
    """Nodes that held the same bits at one snapshot, and different bits at the next one that all of them reported."""

    agreed: Step
    """Step of the snapshot at which the bits were the same."""
    seen: Snapshot
    """The snapshot at which the bits were different."""
    nodes: tuple[NodeId, ...]
    """Nodes that should hold the same bits."""
    wrong: tuple[NodeId, ...] = ()
    """Nodes of `nodes` that differ from a majority of more than half; empty: there is no majority."""


class Lost(StrEnum):
    """Where a straggler's additional time goes."""

    COMPUTING = "computing"
    """The rank computes on a processor: it has more work, or a slower core."""
    QUEUED = "queued"
    """The rank waits for a processor that another process uses."""
    ASLEEP = "asleep"
    """The rank sleeps, but not in a collective: it waits for data, a disk or a lock."""
