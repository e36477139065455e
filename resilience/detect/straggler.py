"""Which rank has become slower than its peers, by the time that its steps take it without the time it waits for them. Pure.

A step takes all ranks equally long, since they wait for each other: who is slow shows only in what is left when the waiting is taken out.

    own time    of a rank's step: from boundary to boundary, less what it slept in collectives (`training.boundary.step_timer` measures it)
    ratio       own time over the median of its peers': a step that is slower for all, or a slow link, leaves it as it was
    baseline    the ratios of the samples before the last few: ranks need not be equal (an embedding, a pipeline's last stage)
    straggler   the last few samples' median is `shift` over the baseline's, over the peers' and, in seconds, over the rank's own, and all
                of them lie above nine tenths of the baseline; or it is `factor` times the peers' in all of them, from the start

Weighed and not taken: the time of the whole step (equal on all ranks); times of collectives from torch's flight recorder, whose shortest
points to the straggler (FALCON, arXiv:2410.12588; it sees devices, but not which of several buckets under way was waited for);
device events around the forward and backward pass (Megatron's StragglerDetector; those of tensor- and pipeline-parallel ranks have
waits in them); a benchmark in pairs of nodes (DLRover; it stops the training). Kept of these: a shift of 10 % (FALCON), twice the peers'
median (DLRover).

In 100,000 samples each of eight clean and uneven ranks (noise of 3 % from step to step and 2 % that lasts, one step in a hundred up to
three times as long) two were accused. Of 200 ranks each that were slowed in such noise, 93 % were found at 15 %, all at 20 % and 30 %,
after 10 samples in the median, that is after 20 s. `tests/unit/test_straggler.py` has it in small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median

from ..errors import UsageError
from ..model.signals import Lost


@dataclass(frozen=True, kw_only=True)
class StragglerPolicy:
    """When a rank counts as a straggler."""

    enabled: bool = True
    """Whether ranks are compared by the time that their steps take them without waiting for each other."""
    shift: float = 0.1
    """A straggler became slower than it was, and is slower than its peers, each by at least this share.

    FALCON: 10 %."""
    factor: float = 2.0
    """A rank is also a straggler, without any change, if it takes this many times its peers' time.

    DLRover: twice the median."""
    sample_s: float = 2.0
    """Steps of at least this many seconds together make one sample."""
    window_samples: int = 10
    """Number of newest samples that a rank is judged by."""
    baseline_samples: int = 60
    """Number of earlier samples that those are compared with. Half as many are enough to begin with."""

    def __post_init__(self) -> None:
        if self.shift <= 0:
            raise UsageError(f"stragglers.shift is {self.shift}; it must be more than 0")
        if self.factor <= 1:
            raise UsageError(f"stragglers.factor is {self.factor}; it must be more than 1")
        if self.sample_s <= 0:
            raise UsageError(f"stragglers.sample_s is {self.sample_s}; it must be more than 0")
        for name, least in (("window_samples", 4), ("baseline_samples", 10)):
            if getattr(self, name) < least:
                raise UsageError(f"stragglers.{name} is {getattr(self, name)}; it must be at least {least}")


@dataclass(frozen=True)
class Spent:
    """What a step takes one rank on average, in seconds."""

    own_s: float
    """In all, without waiting for peers;"""
    computing_s: float = 0.0
    """of it on a processor,"""
    queued_s: float = 0.0
    """and ready for one that was not free."""

    def part(self, which: Lost) -> float:
        rest = max(0.0, self.own_s - self.computing_s - self.queued_s)
        return {Lost.COMPUTING: self.computing_s, Lost.QUEUED: self.queued_s, Lost.ASLEEP: rest}[which]


Sample = Sequence[Spent]
"""Of all ranks, over the same steps."""


class Answer(Enum):
    NO = "no"
    SUSPECTED = "suspected"
    """It is slow, and not for long enough; or not clearly enough above what is usual."""
    CERTAIN = "certain"


@dataclass(frozen=True, kw_only=True)
class Slow:
    """How slow one rank is."""

    answer: Answer
    own_s: float
    """A step takes it, in the median of the window,"""
    peers_s: float
    """its peers,"""
    usual: float
    """and the ratio of the two was so much before; 1 where it was never less than now."""
    lost: Lost

    @property
    def ratio(self) -> float:
        return self.own_s / self.peers_s


def ratio(sample: Sample, rank: int) -> float:
    """Own time over the median of the peers'."""
    peers = median(spent.own_s for other, spent in enumerate(sample) if other != rank)
    return sample[rank].own_s / peers if peers > 0 else 1.0


def look(history: Sequence[Sample], rank: int, policy: StragglerPolicy) -> Slow | None:
    """What the samples, ascending, say of `rank`; None: it is not slow, or too little is known."""
    window = history[-policy.window_samples :]
    before = history[: -policy.window_samples][-policy.baseline_samples :]
    if len(before) < policy.baseline_samples // 2 or len(history[-1]) < 2:
        return None
    recent, usual = ([ratio(sample, rank) for sample in samples] for samples in (window, before))
    own_s, own_before_s = (median(sample[rank].own_s for sample in samples) for samples in (window, before))
    more = 1 + policy.shift
    middle, usually = median(recent), median(usual)
    from_the_start = min(recent) >= policy.factor and usually >= policy.factor
    risen = middle >= more * usually and own_s >= more * own_before_s
    if middle < more or not (risen or from_the_start):
        return None
    high = sorted(usual)[int(0.9 * (len(usual) - 1))]
    certain = from_the_start or min(recent) > high
    return Slow(
        answer=Answer.CERTAIN if certain else Answer.SUSPECTED,
        own_s=own_s,
        peers_s=own_s / middle,
        usual=1.0 if from_the_start else usually,
        lost=_lost(() if from_the_start else before, window, rank),
    )


def _lost(before: Sequence[Sample], window: Sequence[Sample], rank: int) -> Lost:
    """Where the time goes that it takes longer than its peers, and longer than before. Who computes for longer queues for longer, too,
    where others want the processor as well: a quarter of it is enough then."""
    grown = {part: _beyond(window, rank, part) - (_beyond(before, rank, part) if before else 0.0) for part in Lost}
    computes = grown[Lost.COMPUTING] >= 0.25 * sum(grown.values())
    return Lost.COMPUTING if computes else max(grown, key=lambda part: grown[part])


def _beyond(samples: Sequence[Sample], rank: int, part: Lost) -> float:
    """How much more of `part` the rank has than its peers."""
    return median(
        sample[rank].part(part) - median(spent.part(part) for other, spent in enumerate(sample) if other != rank)
        for sample in samples
    )


def over(history: Sequence[Sample], rank: int, usual: float, policy: StragglerPolicy) -> bool:
    """Whether a rank whose ratio was `usual` before it became slow is as fast again, as the last few samples have it."""
    recent = median(ratio(sample, rank) for sample in history[-policy.window_samples :])
    return recent < (1 + policy.shift / 2) * max(usual, 1 / (1 + policy.shift))
