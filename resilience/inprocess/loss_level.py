"""Tell a training that has lost its progress from a loss that is high for a while. Pure.

Most losses that go up come down again by themselves: the data is harder for some steps. The people who train large models go back only
where the loss does not come down (PaLM, arXiv:2204.02311, section 5.1; OPT-175B, arXiv:2205.01068, section 2.5). So a spike
(`loss_spike`) is only watched, and the ranks act on the *level*:

    level      the median of the last `patience_steps` losses
    best       the lowest level so far
    progress   the mean of the first 16 losses, minus `best`
    low        the lowest level of the last 500 to 1000 steps
    noise      σ of the losses around their level when `low` was reached, from the differences between neighbours
    diverged   level > low + `lost_progress` · progress, and also > low + 4 noise. If the progress is at most 20 noise, the level must be
               30 noise above the start; the present noise counts here if it is larger

A loss that wanders (adversarial training, a policy's loss) makes little progress and stays near its start. The loss of a value function
rises over thousands of steps. If a loss starts near zero and rises by design, its noise grows with it: the KL term of GRPO (huggingface trl
#2703), or a hinge that is zero for a while. None of these is judged diverged. Nor is a loss that has been below zero: such a loss is
a difference, like that of a critic. (In wgan-gp's toy example it falls to -5.4 within 80 steps, and rises to -2.7 while the generator
learns.)

The default of `lost_progress` is 0.1. In six public trainings (FineWeb, 124 M to 1 B parameters, 66,740 steps), the level over 64 steps
never rose above `best` by more than 0.023 of the progress; over 16 steps, by 0.054. `benchmarks/judgement.py` plays such curves.

A spike opens a *watch*. The watch ends when the mean of `run_steps` losses is back near the expected loss, or after `patience_steps`. The
steps of a watch do not count as a baseline for later spikes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from itertools import islice, pairwise
from statistics import fmean, median, median_low
from typing import NamedTuple

from ..model.cause import Kind
from ..model.types import Step
from .loss_spike import Figure, Finding, SpikePolicy, expected_loss, spike

_FIRST_LOSSES = 16
_LEAST_PROGRESS = 20.0
"""In units of `noise`. The six public trainings made a progress of 32 noise and more."""
_LEAST_RISE, _RISE_WITHOUT_PROGRESS = 4.0, 30.0
"""In `noise`."""
_MOST_STEPS = 1000
"""A rise must come within this many steps, or within half of them, to count as a divergence."""
_NORMAL_STEP = 0.954
"""Median difference of two numbers with a normal distribution, in σ: 0.6745 · √2."""
_MEAN_STEP = 1.128
"""Mean difference of two such numbers, in σ: 2 / √π. A mean also sees noise that begins in the last half of the steps."""


class Outcome(IntEnum):
    """How a watch ended."""

    OPEN = 0
    BACK = 1
    """The loss is back near the expected loss."""
    STAYS = 2
    """The loss is still high after `patience_steps`, but too little progress is lost to act."""
    ACTED = 3
    """The ranks rewound."""


class Watch(NamedTuple):
    """A spike after which the ranks wait for the loss to come back. Losses are compared with the figures from before the spike."""

    onset: Step
    seen: Step
    expected: float
    scale: float


_NO_WATCH = Watch(Step(-1), Step(-1), 0.0, 0.0)


class Low(NamedTuple):
    level: float = math.inf
    noise: float = 0.0
    """σ of the losses around it."""


class Level(NamedTuple):
    """What the ranks know of a training's losses, besides the last figures. Equal on all ranks, and part of the state."""

    begun: float = 0.0
    """Sum of the first losses; `counted` is their number."""
    counted: int = 0
    best: float = math.inf
    now: float = math.nan
    """The present level; NaN: fewer than `patience_steps` losses are known."""
    noise: float = 0.0
    """σ of the losses around it, from all differences but the largest."""
    well: Step = Step(-1)
    """The last step whose loss was near the lowest recent level."""
    largest_norm: float = 0.0
    """The largest gradient norm of any step. A smaller norm did no harm before."""
    lows: tuple[Low, Low] = (Low(), Low())
    """The lowest level in the last complete span of `_MOST_STEPS` / 2 steps, and in the present span."""
    watch: Watch | None = None
    outcome: Outcome = Outcome.OPEN
    """How the last watch ended; OPEN: there is a watch, or there was none."""
    hard: tuple[Step, Step] = (Step(0), Step(0))
    """First step of the last watch, and the first step after it. Not part of a baseline."""

    def numbers(self) -> list[float]:
        """Return the fields as numbers, of which `of` makes a Level again."""
        *rest, lows, watch, outcome, hard = self
        return [*rest, *lows[0], *lows[1], *(watch or _NO_WATCH), outcome, *hard]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Level:
        if len(numbers) != len(Level().numbers()):  # in a snapshot of an earlier version
            return cls()
        begun, count, best, now, noise, well, norm, *lows = numbers[:11]
        onset, seen, expected, scale, outcome, first, after = numbers[11:]
        watch = Watch(Step(int(onset)), Step(int(seen)), expected, scale) if onset >= 0 else None
        hard = Step(int(first)), Step(int(after))
        low = Low(*lows[:2]), Low(*lows[2:])
        return cls(begun, int(count), best, now, noise, Step(int(well)), norm, low, watch, Outcome(int(outcome)), hard)

    def diverged(self, policy: SpikePolicy) -> bool:
        """Return whether the training has lately lost too much progress."""
        progress = self.begun / max(1, self.counted) - self.best
        low, noise = min(self.lows)
        if progress > _LEAST_PROGRESS * noise:
            rise = max(policy.lost_progress * progress, _LEAST_RISE * noise)
        else:
            rise = max(0.0, progress) + _RISE_WITHOUT_PROGRESS * max(noise, self.noise)
        return self.best >= 0 and self.now > low + rise


def judge(figures: Sequence[Figure], level: Level, policy: SpikePolicy) -> tuple[Finding | None, Level]:
    """Return what is found at the newest of `figures` (sorted by step), and the level after it. A finding of the kind LOSS_DIVERGENCE calls
    for an answer; others are watched."""
    newest = figures[-1]
    level = _advanced(level, figures, policy)
    if not policy.enabled:
        return None, level
    if level.diverged(policy):
        onset = min(level.well + 1, level.watch.onset if level.watch else newest.step)
        found = Finding(
            kind=Kind.LOSS_DIVERGENCE,
            onset=Step(onset),
            seen=newest.step,
            value=level.now,
            expected=min(level.lows).level,
        )
        return found, level
    if level.watch:
        return None, _watched(level, level.watch, figures, policy)
    first, after = level.hard
    usual = figures
    if after > figures[0].step:
        usual = [figure for figure in figures if not first <= figure.step < after]
    usual = usual[-policy.baseline_steps - policy.run_steps :]
    seen = spike(usual, policy, harmless_norm=level.largest_norm, level=level.now)
    if newest.grad_norm is not None:
        level = level._replace(largest_norm=max(level.largest_norm, newest.grad_norm))
    if seen is None:
        return None, level
    losses = [figure.loss for figure in usual if figure.loss is not None and figure.step < seen.onset]
    expected, scale = expected_loss(losses[-policy.baseline_steps :]) if losses else (math.inf, 0.0)
    return seen, level._replace(watch=Watch(seen.onset, seen.seen, expected, scale), outcome=Outcome.OPEN)


def _advanced(level: Level, figures: Sequence[Figure], policy: SpikePolicy) -> Level:
    """Return the level after the newest of `figures`."""
    step, loss, _ = figures[-1]
    if loss is None:
        return level
    if level.counted < _FIRST_LOSSES:
        level = level._replace(begun=level.begun + loss, counted=level.counted + 1)
    # A step has no loss if a loss scaler has skipped it, or the script does not report it.
    newest_first = ((figure.step, figure.loss) for figure in reversed(figures) if figure.loss is not None)
    known = list(islice(newest_first, policy.patience_steps))
    last = [known_loss for _, known_loss in known]
    if len(last) < policy.patience_steps:
        return level._replace(well=step)
    now, steps = median_low(last), [abs(one - other) for one, other in pairwise(last)]
    half = _MOST_STEPS // 2
    before, lately = level.lows if known[:2][-1][0] // half == step // half else (level.lows[1], Low())
    if now < lately.level:
        lately = Low(now, median(steps) / _NORMAL_STEP)
    low = min(before, lately)
    near = math.isinf(level.best) or loss <= low.level + 2 * low.noise
    lows = before, lately
    usual = sorted(steps)[:-1]  # without a jump
    noise, well = fmean(usual) / _MEAN_STEP if usual else 0.0, step if near else level.well
    return level._replace(now=now, noise=noise, best=min(now, level.best), well=well, lows=lows)


def _watched(level: Level, watch: Watch, figures: Sequence[Figure], policy: SpikePolicy) -> Level:
    """Return the level after a step of a watch, which may have ended."""
    step = figures[-1].step
    last = [figure.loss for figure in figures if figure.loss is not None and figure.step > watch.seen]
    back = fmean(last[-policy.run_steps :]) <= watch.expected + policy.each_sigma * watch.scale if last else True
    if back and step >= watch.seen + policy.run_steps:
        return level._replace(watch=None, outcome=Outcome.BACK, hard=(watch.onset, Step(step + 1)))
    if step >= watch.seen + policy.patience_steps:
        # The figures of the watch are the new baseline.
        return level._replace(watch=None, outcome=Outcome.STAYS, hard=(Step(0), watch.onset))
    return level
