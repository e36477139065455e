"""What an agent finds out about its ranks and devices: frozen facts on which every decision rests. This module decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TypeAlias

from .data_windows import Window
from .types import Generation, NodeId, Rank, Step


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """A rank that is gone, but did not end in order."""

    rank: Rank
    at_s: float
    """Wall-clock seconds when the agent saw it."""
    code: int | None = None
    """Exit code; negative: the signal that killed it; None: the kernel does not tell."""
    error: str = ""
    """Last line of the rank's own traceback; empty: it left none."""
    traceback: str = ""
    out_of_memory: bool = False
    """The kernel killed it because memory ran out."""
    started: bool = False
    """Whether it had finished a step in this generation."""
    through: bool = False
    """Whether its loop was over: it had done all steps, and failed after the loop."""
    kind: str = "exit"
    """`exit`, or the reason that the rank itself gave: a `cause.Kind`, `snapshot` (it is damaged), `unreadable` (the snapshot cannot be
    read now), `refused` (a snapshot of something else), `unsavable` (what its Session is given), `broken` (the script is missing, or is
    no Python). `wrapper`: the process that started the rank ended. `no torch`: the launcher ended. `fenced`, `nonsense`: its own agent
    ended it; for `nonsense`, `error` names the impossible value on its page."""
    step: Step = Step(-1)
    """The step that the reason is about."""


class Repeated(IntEnum):
    """Whether steps that the ranks computed again on the same data gave the same figures as before."""

    UNKNOWN = 0
    """No step was computed again, or its earlier figures are not known."""
    SAME = 1
    OTHER = 2


class Place(StrEnum):
    """Where the main thread of a rank stands. It tells whether the rank waits for others."""

    HALTED = "halted"
    """The rank cannot move: a signal stopped it, it is stuck in the kernel, or its interpreter is not up."""
    ELSEWHERE = "elsewhere"
    """The rank is in the script or a library: it works, or it hangs by itself."""
    DATA = "data"
    """The rank waits for its data loader."""
    PERHAPS = "perhaps"
    """The rank may be in a collective: it is in a backward pass, waits for the device, or gives no stack."""
    COLLECTIVE = "collective"
    """The rank waits in a collective. A rank of the same group that is elsewhere holds it up."""
    EXCHANGE = "exchange"
    """The rank waits for others that need not come to the same place: send and receive, or a rendezvous."""
    BOUNDARY = "boundary"
    """The rank waits at our own boundary."""
    TEARDOWN = "teardown"
    """The rank destroys its process groups, or shuts its interpreter down."""


@dataclass(frozen=True, kw_only=True)
class RankStall:
    """A rank that has been silent for longer than its budget, and what two looks at it showed. A status has all living ranks of its
    node, or none: only all together show which rank holds up the others (`hang_rules.judge`)."""

    rank: Rank
    at_s: float
    """Wall-clock seconds of its last sign of life."""
    silent_s: float
    """Seconds from `at_s` to the second look. Only time in which the agent was awake counts."""
    budget_s: float
    """Seconds for which it may be silent."""
    stage: str
    """What that budget is for: `start`, `step`, `evaluation`, `checkpoint`, `tail`."""
    step: Step
    """Steps that it had finished; -1: none in this generation."""
    place: Place
    words: str
    """Where it stands, in words: `in all_reduce, train.py line 31 in main`."""
    site: str = ""
    """The line of the script that led there."""
    moved: bool = False
    """Whether it stood elsewhere at the first look."""
    busy: bool = False
    """Whether it used the processor or the disk between the two looks."""
    why: str = ""
    """What showed `moved` and `busy`."""
    started: bool = False
    """Whether it had finished a step in this generation."""
    stacks: str = ""
    """File with the stacks of all its threads."""


@dataclass(frozen=True, kw_only=True)
class WrongSteps:
    """A fault that ranks found in their figures, and what they did about it."""

    ordinal: int
    """Counted from 1 within the generation."""
    generation: Generation
    cause: str
    onset: Step
    """First step whose figures were wrong."""
    to: Step
    """Step to which the ranks went back, or would have gone back."""
    remedy: str
    """What they did besides going back (`rewind.Remedy`)."""
    window: Window | None = None
    """Batches that they leave out from then on."""
    value: float = 0.0
    """The figure that was wrong."""
    expected: float = 0.0
    """The figure that was expected."""
    at_s: float


@dataclass(frozen=True, kw_only=True)
class InPlaceRewind(WrongSteps):
    """A rewind that the ranks did, by their own decision or by order, as the agent reports it. It happens in the same processes, unless an
    order had to wait for the next ones."""

    reached: Step
    """Newest step finished when the ranks turned back."""
    order: int = 0
    """Number of the order that it obeys; 0: the ranks decided themselves."""
    ranks: tuple[Rank, ...] = ()
    """Ranks whose own gradient, before it was reduced with the others', was unusual for that rank while other ranks' were usual."""
    restore_s: float


@dataclass(frozen=True, kw_only=True)
class Sighting(WrongSteps):
    """A fault for which ranks that only observe would have gone back. The agent reports it once, and the ranks go on. `to` is -1 if no
    remedy would have helped or no state is kept."""

    seen: Step
    """The step at which the ranks found it."""
    last: Step
    """The newest step at which it was still there."""


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """Memory of a node is about to run out."""

    at_s: float
    left_bytes: int
    """Memory left on the machine, or in the tightest control group."""
    lasts_s: float
    """Seconds until it runs out at the present rate."""
    per_s: int
    """Bytes by which it shrinks each second."""
    grows: str
    """The process that takes most of them, such as `rank 1`; empty: not known."""
    grows_per_s: int


@dataclass(frozen=True, kw_only=True)
class Complaint:
    """A report by a device, or its driver, that something is wrong with it."""

    device: str
    words: str
    at_s: float
    step: int
    """Newest step done when that was seen; -1: none."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank whose steps take longer than its peers' and longer than its own did. Only its own time counts, without waiting for others."""

    rank: Rank
    at_s: float
    step: Step
    """Newest step done when that was certain."""
    own_s: float
    """Its own time for a step."""
    peers_s: float
    """The median of its peers' own times."""
    usual: float
    """The ratio of the two before."""
    lost: str
    """Where the additional time goes (`Lost`)."""


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Replicas that had held the same bits, and differed when they were compared."""

    generation: Generation
    """Generation in which it was found. The ranks may be those of the generation before."""
    onset: Step
    """First step that was found wrong."""
    agreed: Step
    """Last step before it that was found right; -1: none."""
    tensors: tuple[str, ...]
    """Names of the first few tensors that differ."""
    count: int
    """Number of all tensors that differ."""
    ranks: tuple[Rank, ...]
    """Ranks that should hold the same bits."""
    wrong: tuple[Rank, ...] = ()
    """Those of `ranks` that are known to be wrong; empty: not known, with two replicas or equally many of each value."""
    replayed: bool = False
    """The ranks had to compute the step again to show which of them were wrong."""
    at_s: float


Snapshot: TypeAlias = tuple[int, ...]
"""Generation, number of rewinds, and step. Snapshots sort in the order in which they were taken."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a node's ranks held at the last snapshots that all nodes check: those for the disk or for another node's memory. Its text has a
    word for each snapshot. The leader gets thousands of such texts at a time, mostly equal, and parses those that differ."""

    model: str
    """Equal on nodes whose ranks, one by one, are replicas of each other."""
    words: Mapping[Snapshot, int]
    """By snapshot: one number for the bits of all ranks."""

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
    """Step of the first of these snapshots."""
    seen: Snapshot
    """The second of these snapshots."""
    nodes: tuple[NodeId, ...]
    """Nodes that should hold the same bits."""
    wrong: tuple[NodeId, ...] = ()
    """Those of `nodes` that differ from a majority of more than half; empty: there is no such majority."""


class Lost(StrEnum):
    """Where a straggler's additional time goes."""

    COMPUTING = "computing"
    """The rank computes on a processor: it has more work, or a slower core."""
    QUEUED = "queued"
    """The rank waits for a processor that another process uses."""
    ASLEEP = "asleep"
    """The rank sleeps, but in no collective: it waits for data, a disk or a lock."""
