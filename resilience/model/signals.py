"""What an agent finds out about its ranks and devices: frozen facts that every judgement is made of; no judgement in here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TypeAlias

from .data_windows import Window
from .types import Generation, NodeId, Rank, Step


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
    through: bool = False
    """Whether its loop was over: it had done all steps, and failed behind them."""
    kind: str = "exit"
    """`exit`, or what the rank itself named as its end: a `loss_spike.Kind`, `snapshot` (damaged), `unreadable` (a snapshot, now),
    `refused` (a snapshot of something else), `unsavable` (what its Session is given), `broken` (the script is not there, or is no Python).
    `wrapper`: of the process that has started the rank. `no torch`, of the launcher. Or its own agent has ended it: `fenced`, or `nonsense`
    (the error says what stood on its page, and cannot be)."""
    step: Step = Step(-1)
    """The step that such an end is about."""


class Repeated(IntEnum):
    """Whether steps that were computed again, on the same data, gave the figures that they had given before."""

    UNKNOWN = 0
    """None was computed again, or nothing is known of what it gave before."""
    SAME = 1
    OTHER = 2


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
    node, or none: which of them holds up the others can be told from all together (`hang_rules.judge`)."""

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
class WrongSteps:
    """What ranks have found wrong with their figures, and what it led to."""

    ordinal: int
    """Counted from 1 within the generation."""
    generation: Generation
    cause: str
    onset: Step
    """First step whose figures were wrong."""
    to: Step
    """Where the ranks have gone back to, or would have;"""
    remedy: str
    """and what they did besides (`rewind_ladder.Remedy`)."""
    window: Window | None = None
    """Batches that they leave out from then on."""
    value: float = 0.0
    """The figure that was wrong,"""
    expected: float = 0.0
    """and what was to be expected."""
    at_s: float


@dataclass(frozen=True, kw_only=True)
class InPlaceRewind(WrongSteps):
    """A rewind that the ranks did, as the agent reports it: of their own accord or by order, in the same processes but where an order had
    to wait for the next ones."""

    reached: Step
    """Newest step finished when the ranks turned back."""
    order: int = 0
    """Number of the order that it obeys; 0: the ranks' own judgement."""
    ranks: tuple[Rank, ...] = ()
    """Ranks whose own gradient, before the ranks' were added up, was out of line with what it usually is, while that of others was not."""
    restore_s: float


@dataclass(frozen=True, kw_only=True)
class Sighting(WrongSteps):
    """What ranks that observe only would have gone back for: told once per fault, and they went on. `to` is -1 where nothing would have
    helped or nothing is kept."""

    seen: Step
    """The step at which it was found,"""
    last: Step
    """and the newest one at which it still was."""


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
    """Where the further time goes (`Lost`)."""


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


Snapshot: TypeAlias = tuple[int, ...]
"""Generation, rewinds and step: ordered as they were taken."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """What the ranks of a node have held at the last snapshots that all nodes look at: what goes to disk or into another node's memory. Its
    text is a word each: whoever leads hears that of thousands of nodes at a time, mostly the same, and reads what differs."""

    model: str
    """Equal on nodes whose ranks, one by one, are replicas of each other."""
    words: Mapping[Snapshot, int]
    """One number for the bits of all ranks."""

    def __str__(self) -> str:
        return " ".join((self.model, *(".".join(map(str, (*at, word))) for at, word in sorted(self.words.items()))))

    @classmethod
    def parse(cls, text: str) -> Held:
        model, *words = text.split(" ")
        found = [[*map(int, word.split("."))] for word in words]
        return cls(model=model, words={(*at,): word for *at, word in found})


@dataclass(frozen=True, kw_only=True)
class Parted:
    """Nodes that held the same bits at one snapshot, and did not at the next one that all of them have told."""

    agreed: Step
    """The former,"""
    seen: Snapshot
    """and the latter."""
    nodes: tuple[NodeId, ...]
    """That should hold the same,"""
    wrong: tuple[NodeId, ...] = ()
    """and of these the ones that differ from more than half; none: there is no such majority."""


class Lost(StrEnum):
    """Where a straggler's further time goes."""

    COMPUTING = "computing"
    """On a processor: more work, or a slower core."""
    QUEUED = "queued"
    """Waiting for a processor: somebody else has it."""
    ASLEEP = "asleep"
    """Neither, and in no collective: its data, a disk, a lock."""
