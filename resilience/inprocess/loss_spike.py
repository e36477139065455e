"""Detect spikes in loss and gradient norm, step by step. Pure.

A *loss spike* is a run of steps that all lie above the expected loss, and on average far above it:

    baseline   the `baseline_steps` figures before the run, minus their trend (the slope between the medians of both halves)
    expected   the baseline's median, moved along the trend to the baseline's end. The trend is not extrapolated.
    scale      an estimate of σ: the range of the middle 95 % of the baseline over 2 · 1.96. A few outliers do not widen it.
               It is at least half the figures' grain (their smallest difference): figures may be rounded (bfloat16 to 1 %)
    spike      `run_steps` steps in a row: each is more than `each_sigma` scales above expected, and their mean more than `mean_sigma`

The rule asks for three steps, because single outliers are common in a loss and a hard batch has no lasting effect. A training is harmed by
a loss that does not come down again (PaLM, arXiv:2204.02311, section 5.1).

A *gradient spike* is one gradient norm above `gradient_factor` times the baseline's median. Data does not cause such a norm; a flipped bit
in an exponent does.

The defaults below were simulated on 400,000 steps of a loss that falls by a power law, for each kind of noise. Normal noise gave no false
spike, Student's t with 5 degrees of freedom gave one. Jumps of 6 σ were found at their third step in 99.8 % and 99.1 % of cases,
respectively. (`tests/unit/test_loss_spike.py` repeats the simulation with fewer steps.)

False spikes per 100,000 steps, from 200,000 simulated steps with noise that the rule is not made for:

    noise correlated from step to step        0.5 (ρ = 0.5), 22 (ρ = 0.8), 30 (ρ = 0.9)
    exponential; log-normal noise             8; 1.5 (of 0.4), 11 (of 0.8)
    one batch in 20 to 100 lies 10 σ higher   5
    stretches of harder data                  33 (20 steps by 3 σ, every 500), 78 (5 steps by 5 σ, every 100)
    learning rate falls in steps, or returns over 100 steps or more; figures missing (fp16), small (1e-8), negative, rounded: 0

Two variants were rejected. Giving outliers in a run less weight halves the false spikes of rare batches. Widening the scale for long
tails or lasting noise misses jumps of 6 σ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from ..errors import UsageError
from ..model.cause import Kind
from ..model.types import Step

NORMAL_95 = 1.96
"""Half the range of the middle 95 % of a normal distribution, in σ."""
_COARSEST = 2.0**-7
"""Grain of bfloat16, as a share of the figure, used if all figures are equal, because equal figures show no grain."""


@dataclass(frozen=True, kw_only=True)
class SpikePolicy:
    """When a loss or a gradient norm counts as a spike."""

    enabled: bool = True
    """Whether the ranks judge loss and gradient norm. NaN and Inf are always judged. Set `spikes.enabled` to false if
    the loss jumps by design."""
    baseline_steps: int = 128
    """Number of past steps from which the expected loss and its usual noise are computed. No step is judged before
    this many have passed."""
    run_steps: int = 3
    """A high loss counts as a spike once it has lasted this many steps. Fewer steps find a spike earlier and give
    more false alarms."""
    each_sigma: float = 2.0
    """In a loss spike, each step lies above the expected loss by more than this many times the usual noise."""
    mean_sigma: float = 4.0
    """In a loss spike, the mean of the steps lies above the expected loss by more than this many times the usual noise.
    Raise `spikes.mean_sigma` if normal jumps of the loss are taken for spikes."""
    gradient_factor: float = 100.0
    """A single step is a spike if its gradient norm is more than this many times the median of the baseline, and larger
    than at any step before."""
    patience_steps: int = 64
    """How many steps a loss that is too high gets to come back by itself. The ranks act on the median of this many
    losses.

    In six public trainings (`loss_level`), harder data raised the loss for 20 steps at most."""
    lost_progress: float = 0.1
    """The ranks rewind if the median of the last `patience_steps` losses has risen by more than this share of the progress that the
    training has made.

    In healthy public trainings, it rose by 0.023 of the progress at most."""

    def __post_init__(self) -> None:
        if self.baseline_steps < 16:
            raise UsageError(
                f"spikes.baseline_steps is {self.baseline_steps}; fewer than 16 steps do not show what to expect"
            )
        if self.run_steps < 1:
            raise UsageError(f"spikes.run_steps is {self.run_steps}; it must be at least 1")
        if not 0 < self.each_sigma <= self.mean_sigma:
            raise UsageError(
                f"spikes.each_sigma is {self.each_sigma} and spikes.mean_sigma {self.mean_sigma}; they must be more than 0, and the first "
                "no more than the second"
            )
        if self.patience_steps < self.run_steps:
            raise UsageError(
                f"spikes.patience_steps is {self.patience_steps}; it must be at least spikes.run_steps ({self.run_steps})"
            )
        if not 0 < self.lost_progress <= 1:
            raise UsageError(f"spikes.lost_progress is {self.lost_progress}; it must be more than 0, and at most 1")
        if self.gradient_factor <= 1:
            raise UsageError(f"spikes.gradient_factor is {self.gradient_factor}; it must be more than 1")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Wrong figures, as all ranks judge them."""

    kind: Kind
    onset: Step
    """The first wrong step. The state before this step is not suspected."""
    seen: Step
    """The step at which the ranks found the fault."""
    value: float = 0.0
    """The wrong figure; for a loss spike, the mean of its steps."""
    expected: float = 0.0
    """The figure expected from the steps before; for a NaN that follows a spike, the loss expected before the spike."""


class Figure(NamedTuple):
    """The figures of one step over all ranks. None: no rank knew the figure, or the optimizer skipped the step."""

    step: Step
    loss: float | None
    grad_norm: float | None


def spike(
    figures: Sequence[Figure], policy: SpikePolicy, harmless_norm: float = 0.0, level: float = math.nan
) -> Finding | None:
    """Return the spike that ends at the newest of `figures` (sorted by step), or None. harmless_norm: a gradient norm that did no harm
    earlier in the training. level: the median of the last losses; no loss up to it is a spike. NaN: it is not known."""
    if not policy.enabled or not figures:
        return None
    _, loss, norm = figures[-1]
    found = _of_gradient(figures, policy) if norm is not None and norm > harmless_norm else None
    return found or (None if loss is None or loss <= level else _of_loss(figures, policy))


def _of_gradient(figures: Sequence[Figure], policy: SpikePolicy) -> Finding | None:
    newest = figures[-1]
    baseline = [f.grad_norm for f in figures[-1 - policy.baseline_steps : -1] if f.grad_norm is not None]
    if newest.grad_norm is None or len(baseline) < policy.baseline_steps:
        return None
    usual = median(baseline)
    if not 0 < policy.gradient_factor * usual < newest.grad_norm:
        return None
    return Finding(
        kind=Kind.GRADIENT_SPIKE, onset=newest.step, seen=newest.step, value=newest.grad_norm, expected=usual
    )


def _of_loss(figures: Sequence[Figure], policy: SpikePolicy) -> Finding | None:
    known = [f.loss for f in figures if f.loss is not None]
    baseline, run = known[-policy.run_steps - policy.baseline_steps : -policy.run_steps], known[-policy.run_steps :]
    if len(baseline) < policy.baseline_steps or figures[-1].loss is None:
        return None
    level = _without_trend(baseline)
    expected, lowest = median(level), min(run)
    if lowest <= expected:  # as in most steps: then the scale, which is never below 0, does not matter
        return None
    scale, value = _scale(baseline, level), fmean(run)
    if lowest <= expected + policy.each_sigma * scale or value <= expected + policy.mean_sigma * scale:
        return None
    onset = [f.step for f in figures if f.loss is not None][-policy.run_steps]
    return Finding(kind=Kind.LOSS_SPIKE, onset=onset, seen=figures[-1].step, value=value, expected=expected)


def expected_loss(baseline: Sequence[float]) -> tuple[float, float]:
    """Return the loss that is expected after `baseline`, and the scale of the noise around it."""
    level = _without_trend(baseline)
    return median(level), _scale(baseline, level)


def _without_trend(baseline: Sequence[float]) -> list[float]:
    """Return the figures of `baseline`, moved along their trend to its end, sorted."""
    half, end = len(baseline) // 2, len(baseline) - 1
    slope = (median(baseline[-half:]) - median(baseline[:half])) / (len(baseline) - half)
    return sorted([value + slope * (end - at) for at, value in enumerate(baseline)])


def _scale(baseline: Sequence[float], level: Sequence[float]) -> float:
    """Return the scale of the usual noise of `baseline`. level: its figures without their trend, sorted."""
    beyond = max(1, round(0.025 * len(level)))
    scale = (level[-1 - beyond] - level[beyond]) / (2 * NORMAL_95)
    told = sorted(baseline)[beyond:-beyond]
    grain = min((b - a for a, b in pairwise(told) if b > a), default=abs(told[0]) * _COARSEST)
    return max(scale, grain / 2)
