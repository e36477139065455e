"""Detect ranks that became slower than their peers. Compared is each rank's own time for a step, which excludes waits for peers. Pure.

A step takes equally long on all ranks, because they wait for each other. A slow rank shows only after these waits are subtracted.

    own time    a rank's time between two step boundaries, minus its sleep in collectives (`training.boundary.step_timer`)
    ratio       own time over the median of its peers'. A step that is slower for all ranks, or a slow link, does not change it
    baseline    the ratios of the samples before the window: ranks may have unequal work (an embedding, a pipeline's last stage)
    straggler   over the window, the median ratio is `shift` above the baseline's and above 1, and the rank's own seconds are `shift` above
                what they were. Each ratio exceeds the baseline's 90th percentile. Or each ratio, and the baseline's median, is at least
                `factor`

Four other measures were rejected. The time of the whole step is equal on all ranks. Times of collectives from torch's flight recorder point
to the straggler, whose times are the shortest (FALCON, arXiv:2410.12588). But such times show devices, and not which of several concurrent
buckets a rank waits for. Device events around the forward and backward pass (Megatron's StragglerDetector) include waits under tensor or
pipeline parallelism. A benchmark in pairs of nodes (DLRover) stops the training. Two thresholds were adopted: a shift of 10 % (FALCON), and
twice the peers' median (DLRover).

A simulation of eight healthy, uneven ranks with 100,000 samples each gave two false findings. The simulation's noise was 3 % from step to
step and 2 % lasting; one step in a hundred took up to three times as long. In the same noise, 200 ranks each were slowed down by 15, 20 and
30 %: 93 % of them were found at 15 %, and all at 20 % and 30 %. The median delay was 10 samples, that is 20 s.
`tests/unit/test_straggler.py` repeats this with fewer samples.
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
    """When a rank counts as a straggler. Stragglers are only reported."""

    enabled: bool = True
    """Whether the agents compare the times that ranks take for a step, without their waits for each other."""
    shift: float = 0.1
    """A rank is a straggler if, by at least this share, it is slower than its peers and has become slower than it
    was. Lower values find smaller slowdowns and give more false alarms.

    FALCON: 10 %."""
    factor: float = 2.0
    """A rank is also a straggler if it has always taken this many times as long as its peers.

    DLRover: twice the median."""
    sample_s: float = 2.0
    """Consecutive steps that together take at least this many seconds make one sample."""
    window_samples: int = 10
    """A rank is judged by this many newest samples. More samples make the result more certain, but later."""
    baseline_samples: int = 60
    """The newest samples are compared with this many samples before them. At the start, half as many are enough."""

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
    """One rank's average time for a step, in seconds."""

    own_s: float
    """The whole time, without waits for peers."""
    computing_s: float = 0.0
    """Part of `own_s`: on a processor."""
    queued_s: float = 0.0
    """Part of `own_s`: ready to run, but no processor was free."""

    def part(self, which: Lost) -> float:
        rest = max(0.0, self.own_s - self.computing_s - self.queued_s)
        return {Lost.COMPUTING: self.computing_s, Lost.QUEUED: self.queued_s, Lost.ASLEEP: rest}[which]


Sample = Sequence[Spent]
"""One entry for each rank, over the same steps."""


class Answer(Enum):
    NO = "no"
    SUSPECTED = "suspected"
    """The rank is slow, but not for long enough, or not clearly enough above its baseline."""
    CERTAIN = "certain"


@dataclass(frozen=True, kw_only=True)
class Slow:
    """How slow one rank is."""

    answer: Answer
    own_s: float
    """The rank's own time for a step, median of the window."""
    peers_s: float
    """The time of the rank's peers for a step."""
    usual: float
    """The ratio of `own_s` to `peers_s` in the baseline; 0: the rank was as slow in the baseline, so it has no other usual ratio."""
    lost: Lost

    @property
    def ratio(self) -> float:
        return self.own_s / self.peers_s


def ratio(sample: Sample, rank: int) -> float:
    """Return the rank's own time, divided by the median of its peers' own times."""
    peers = median(spent.own_s for other, spent in enumerate(sample) if other != rank)
    return sample[rank].own_s / peers if peers > 0 else 1.0


def look(history: Sequence[Sample], rank: int, policy: StragglerPolicy) -> Slow | None:
    """Return how slow `rank` is, from the samples (oldest first). None: the rank is not slow, or there are too few samples."""
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
        usual=0.0 if from_the_start else usually,
        lost=_lost(() if from_the_start else before, window, rank),
    )


def _lost(before: Sequence[Sample], window: Sequence[Sample], rank: int) -> Lost:
    """Return where the rank's extra time goes. The time is compared with its peers' and with the baseline. If processors are contended, a
    rank that computes for longer also queues for longer. So the answer is COMPUTING if computing takes at least a quarter of the extra
    time."""
    grown = {part: _beyond(window, rank, part) - (_beyond(before, rank, part) if before else 0.0) for part in Lost}
    computes = grown[Lost.COMPUTING] >= 0.25 * sum(grown.values())
    return Lost.COMPUTING if computes else max(grown, key=lambda part: grown[part])


def _beyond(samples: Sequence[Sample], rank: int, part: Lost) -> float:
    """Return by how many seconds a step the rank's `part` exceeds that of its peers (medians)."""
    return median(
        sample[rank].part(part) - median(spent.part(part) for other, spent in enumerate(sample) if other != rank)
        for sample in samples
    )


def over(history: Sequence[Sample], rank: int, usual: float, policy: StragglerPolicy) -> bool:
    """Whether a slow rank is fast again, by the last samples. usual: its ratio before it became slow."""
    recent = median(ratio(sample, rank) for sample in history[-policy.window_samples :])
    return recent < (1 + policy.shift / 2) * max(usual, 1 / (1 + policy.shift))
