"""Loss and gradient norm, step by step → whether they have gone up for no good reason. Pure.

A *loss spike* is a run of steps that all lie above what the steps before let expect, and on average far above:

    baseline   `baseline_steps` figures before the run, less their trend (the medians of both halves)
    expected   the baseline's median at its end: a falling loss is not taken to fall on
    scale      half the range of the middle 95 % of the baseline, as a normal distribution has it (1.96 σ): a few outliers do not widen it.
               At least half the grain that these figures come in, for they may be rounded (a loss in bfloat16 has steps of 1 %)
    spike      `run_steps` in a row, each more than `each_sigma` and on average more than `mean_sigma` scales above expected

A run of three, and not one outlier, because heavy tails are common in a loss and a batch that is merely hard mends itself; a loss that
does not come down again is what costs a training (PaLM, arXiv:2204.02311, section 5.1).

A *gradient spike* is one norm that is `gradient_factor` times the median of the baseline: no data does that, a flipped bit in an exponent
does.

Found with these figures on 400,000 steps of a falling power law each: with normal noise no false spike, with Student's t of 5 degrees one
in 400,000; jumps of 6 σ are found at their third step in 99.8 % and 99.1 % (`tests/unit/test_loss_spike.py` has it in small).

False ones in 100,000 steps (200,000 each) of noise that it is not made for: 22 and 30 where a step's noise hangs on the last one's (ρ
of 0.8, 0.9; of 0.5: 0.5), 8 of exponential and 11 of log-normal noise (of 0.8; of 0.4: 1.5), 5 where one batch in 100 to 20 lies 10 σ
higher, 33 and 78 where all batches of a stretch of the data are harder (20 steps by 3 σ, each 500; 5 by 5 σ, each 100). None where
learning rates fall in steps or come back over 100 steps and more, figures are missing (fp16), small (1e-8), negative, or rounded.
Counting outliers in a run for less halves those of rare batches, and what widens the scale for a long tail, or for noise that lasts,
misses jumps of 6 σ: neither was taken.
"""

from __future__ import annotations

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
"""The grain of bfloat16, as a share of the figure: that of figures which are all the same is not seen."""


@dataclass(frozen=True, kw_only=True)
class SpikePolicy:
    """When a loss or a gradient norm counts as a spike."""

    enabled: bool = True
    """Whether the ranks judge loss and gradient norm. They always judge NaN and Inf."""
    baseline_steps: int = 128
    """Number of steps that the expected loss is computed from. No step is judged before this many have passed."""
    run_steps: int = 3
    """A loss spike lasts at least this many steps. It is found at the last of them."""
    each_sigma: float = 2.0
    """Each step of a loss spike lies more than this many scales above the expected loss."""
    mean_sigma: float = 4.0
    """The mean of the steps of a loss spike lies more than this many scales above the expected loss."""
    gradient_factor: float = 100.0
    """A gradient norm of this many times the baseline's median is a spike by itself."""

    def __post_init__(self) -> None:
        if self.baseline_steps < 16:
            raise UsageError(
                f"spikes.baseline_steps is {self.baseline_steps}; fewer than 16 say nothing of what to expect"
            )
        if self.run_steps < 1:
            raise UsageError(f"spikes.run_steps is {self.run_steps}; it must be at least 1")
        if not 0 < self.each_sigma <= self.mean_sigma:
            raise UsageError(
                f"spikes.each_sigma is {self.each_sigma} and spikes.mean_sigma {self.mean_sigma}; they must be more than 0, and the first "
                "no more than the second"
            )
        if self.gradient_factor <= 1:
            raise UsageError(f"spikes.gradient_factor is {self.gradient_factor}; it must be more than 1")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A step whose figures are wrong, as all ranks found it together."""

    kind: Kind
    onset: Step
    """The first step that is wrong; the state before it is not suspected."""
    seen: Step
    """The step at which it was found."""
    value: float = 0.0
    """The figure, or the mean of the run's,"""
    expected: float = 0.0
    """and what the steps before let expect."""


class Figure(NamedTuple):
    """What all ranks together said of one step; None where nobody knew or the optimizer left it out."""

    step: Step
    loss: float | None
    grad_norm: float | None


def spike(figures: Sequence[Figure], policy: SpikePolicy) -> Finding | None:
    """Whether the newest of `figures`, ascending, is the end of a spike."""
    if not policy.enabled or not figures:
        return None
    return _of_gradient(figures, policy) or _of_loss(figures, policy)


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
    known = [f for f in figures if f.loss is not None]
    run, before = known[-policy.run_steps :], known[-policy.run_steps - policy.baseline_steps : -policy.run_steps]
    if len(before) < policy.baseline_steps or run[-1] is not figures[-1]:
        return None
    expected, scale = _expected([f.loss for f in before if f.loss is not None])
    losses = [f.loss for f in run if f.loss is not None]
    value = fmean(losses)
    high = min(losses) > expected + policy.each_sigma * scale and value > expected + policy.mean_sigma * scale
    if not high:
        return None
    return Finding(kind=Kind.LOSS_SPIKE, onset=run[0].step, seen=run[-1].step, value=value, expected=expected)


def _expected(baseline: Sequence[float]) -> tuple[float, float]:
    """The figure that is to be expected at the end of `baseline`, and the scale of what is usual around it."""
    half = len(baseline) // 2
    slope = (median(baseline[-half:]) - median(baseline[:half])) / (len(baseline) - half)
    end = len(baseline) - 1
    level = sorted(value + slope * (end - at) for at, value in enumerate(baseline))
    beyond = max(1, round(0.025 * len(level)))
    scale = (level[-1 - beyond] - level[beyond]) / (2 * NORMAL_95)
    told = sorted(baseline)[beyond:-beyond]
    grain = min((b - a for a, b in pairwise(told) if b > a), default=abs(told[0]) * _COARSEST)
    return median(level), max(scale, grain / 2)
