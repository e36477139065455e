"""What is a spike, and what is not: curves as they are recorded, with noise of several kinds."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from mt_resilient.resilience.errors import UsageError
from mt_resilient.resilience.inprocess.loss_spike import Figure, Finding, SpikePolicy, spike
from mt_resilient.resilience.model.cause import Kind
from mt_resilient.resilience.model.types import Step

POLICY = SpikePolicy()
Noise = Callable[[np.random.Generator, int], NDArray[np.float64]]
KINDS: dict[str, Noise] = {
    "normal": lambda chance, n: chance.standard_normal(n),
    "heavy tails": lambda chance, n: chance.standard_t(5, n) / math.sqrt(5 / 3),
    "uniform": lambda chance, n: (chance.random(n) - 0.5) * math.sqrt(12),
}


def curve(chance: np.random.Generator, steps: int, noise: Noise) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """A loss that falls as a power of the step, and the standard deviation of its noise."""
    at = np.arange(1, steps + 1)
    sigma = 0.02 + 0.05 * (at + 50.0) ** -0.1
    return 1.8 + 8 * (at + 50.0) ** -0.25 + sigma * noise(chance, steps), sigma


def found(losses: NDArray[np.float64], first: int = 0) -> list[Finding]:
    """What is found in all of them, step by step."""
    figures = [Figure(Step(n), float(loss), 1.0) for n, loss in enumerate(losses)]
    kept = POLICY.baseline_steps + POLICY.run_steps
    judged = (spike(figures[max(0, n - kept) : n], POLICY) for n in range(first + 1, len(figures) + 1))
    return [finding for finding in judged if finding]


@pytest.mark.parametrize("kind", KINDS)
def test_clean_steps_are_not_found_wrong(kind: str) -> None:
    losses, _ = curve(np.random.default_rng(1), 5_000, KINDS[kind])
    assert not found(losses)


@pytest.mark.parametrize("kind", KINDS)
def test_a_jump_of_six_sigma_is_found_within_three_steps(kind: str) -> None:
    """98 of 100 at least in a sample of 300: the true share is 99 % and more."""
    chance = np.random.default_rng(2)
    losses, sigma = curve(chance, 20_000, KINDS[kind])
    at_once = 0
    for onset in chance.integers(200, 19_990, 300):
        hurt = losses[onset - 131 : onset + 3].copy()
        hurt[131:] += 6 * sigma[onset]
        findings = found(hurt, first=131)
        at_once += any(f.kind is Kind.LOSS_SPIKE and 129 <= f.onset <= 131 for f in findings)
    assert at_once >= 294


def test_where_it_began_and_what_was_expected() -> None:
    losses = np.concatenate([np.tile([1.0, 1.1], 80), [3.0, 3.5, 4.0]])
    (finding,) = found(losses)
    assert (finding.kind, finding.onset, finding.seen) == (Kind.LOSS_SPIKE, 160, 162)
    assert finding.value == pytest.approx(3.5)
    assert finding.expected == pytest.approx(1.05, abs=0.06)


@pytest.mark.parametrize(
    "losses",
    [
        np.concatenate([np.tile([1.0, 1.1], 80), [9.0, 1.1, 1.0]]),  # one hard batch
        np.concatenate([np.tile([1.0, 1.1], 80), [9.0, 9.0, 1.0]]),
        np.concatenate([np.tile([1.0, 1.1], 80), [0.1, 0.1, 0.1]]),  # a loss that falls
        np.tile([1.0, 1.1], 60),
        np.concatenate([np.tile([1.0, 1.1], 60), [9.0, 9.0, 9.0]]),  # nothing is known yet
        np.linspace(10.0, 1.0, 400),
    ],
)
def test_what_is_no_spike(losses: NDArray[np.float64]) -> None:
    assert not found(losses)


def rounded(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """As bfloat16 has them."""
    grain = 2.0 ** (np.floor(np.log2(losses)) - 7)
    return np.asarray(np.round(losses / grain) * grain)


def test_what_is_rounded_is_no_better_known_than_to_half_its_grain() -> None:
    chance = np.random.default_rng(12)
    assert not found(rounded(2.44 + 0.006 * chance.standard_normal(12_000)))
    assert not found(np.concatenate([np.full(160, 0.6931), np.full(3, 0.69311)])), (
        "no figure differs: which is the grain?"
    )
    assert found(np.concatenate([np.full(160, 0.6931), np.full(3, 0.72)]))
    noise = 0.06 * chance.standard_normal(160)
    assert found(rounded(np.concatenate([2.4 + noise, np.full(3, 2.4 + 6 * 0.06)])))


def test_a_rise_that_has_gone_on_for_long_is_expected() -> None:
    """A curriculum that grows harder: the trend is taken out of what is usual."""
    chance = np.random.default_rng(3)
    assert not found(1 + 0.002 * np.arange(2_000) + 0.05 * chance.standard_normal(2_000))


def test_a_gradient_beyond_all_proportion_is_found_at_once() -> None:
    figures = [Figure(Step(n), 1.0, 0.5 + 0.1 * (n % 3)) for n in range(128)]
    assert spike([*figures, Figure(Step(128), 1.0, 40.0)], POLICY) is None
    finding = spike([*figures, Figure(Step(128), 1.0, 1e9)], POLICY)
    assert finding == Finding(
        kind=Kind.GRADIENT_SPIKE, onset=Step(128), seen=Step(128), value=1e9, expected=pytest.approx(0.6)
    )


def test_a_gradient_goes_before_a_loss_and_wants_a_baseline_that_is_more_than_0() -> None:
    figures = [Figure(Step(n), 1.0 + 0.01 * (n % 2), 1.0) for n in range(140)]
    both = [*figures, *(Figure(Step(140 + n), 9.0, 1.0 if n < 2 else 1e9) for n in range(3))]
    finding = spike(both, POLICY)
    assert finding
    assert (finding.kind, finding.onset) == (Kind.GRADIENT_SPIKE, 142)
    assert spike([*figures[:127], Figure(Step(127), 1.0, 1e9)], POLICY) is None, "one too few are known"
    assert spike([*(f._replace(grad_norm=0.0) for f in figures), Figure(Step(140), 1.0, 1e9)], POLICY) is None


def test_a_step_whose_loss_is_not_known_ends_no_spike() -> None:
    figures = [Figure(Step(n), 1.0 + 0.01 * (n % 2), 1.0) for n in range(140)]
    assert spike([*figures, *(Figure(Step(140 + n), 9.0, 1.0) for n in range(3))], POLICY)
    assert (
        spike([*figures, *(Figure(Step(140 + n), 9.0, 1.0) for n in range(3)), Figure(Step(143), None, 1.0)], POLICY)
        is None
    )


def test_what_is_expected_of_an_odd_number_of_steps() -> None:
    """The trend is measured between the middles of both halves."""
    policy = SpikePolicy(baseline_steps=33)
    figures = [Figure(Step(n), float(n), None) for n in range(33)]
    finding = spike([*figures, *(Figure(Step(33 + n), 99.0, None) for n in range(3))], policy)
    assert finding
    assert finding.expected == pytest.approx(32.0)


def test_steps_without_figures_are_passed_over() -> None:
    figures = [Figure(Step(n), 1.0 + 0.01 * (n % 2) if n % 2 else None, None) for n in range(300)]
    assert spike(figures, POLICY) is None
    assert spike([*figures, Figure(Step(300), None, None)], POLICY) is None
    assert spike([], POLICY) is None


def test_it_can_be_switched_off() -> None:
    figures = [Figure(Step(n), 1.0 + 0.01 * (n % 2), 1.0) for n in range(200)]
    spiked = [*figures, *(Figure(Step(n), 9.0, 1.0) for n in range(200, 203))]
    assert spike(spiked, POLICY)
    assert spike(spiked, SpikePolicy(enabled=False)) is None


@pytest.mark.parametrize(
    "values",
    [{"baseline_steps": 15}, {"run_steps": 0}, {"each_sigma": 0.0}, {"each_sigma": 5.0}, {"gradient_factor": 1.0}],
)
def test_policies_that_make_no_sense_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(values))):
        SpikePolicy(**values)  # type: ignore[arg-type]
