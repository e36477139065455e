"""What is taken to be plain without a further look holds no spike; and most of a calm training is."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_resilient.resilience.inprocess.loss_spike import Figure, SpikePolicy, spike
from mt_resilient.resilience.inprocess.spike_screen import Usual
from mt_resilient.resilience.model.types import Step

POLICIES = [SpikePolicy(baseline_steps=16), SpikePolicy(baseline_steps=33), SpikePolicy(run_steps=1)]


def curve(seed: int, steps: int) -> list[Figure]:
    """A loss with stretches of every kind: falling, rising, flat, quiet, jumping, with steps whose figures nobody knows."""
    chance = np.random.default_rng(seed)
    found: list[Figure] = []
    level, slope, noise = 5.0, 0.0, 0.1
    for step in range(steps):
        if chance.random() < 0.01:
            slope, noise = chance.normal() * 0.01, float(chance.choice([0.0, 0.01, 0.1, 1.0]))
        level += slope + (chance.normal() * 3 if chance.random() < 0.005 else 0.0)
        norm = float(abs(chance.normal()) * 10.0 ** (4 if chance.random() < 0.01 else 0))
        unknown = chance.random() < 0.002
        found.append(Figure(Step(step), None if unknown else float(level + noise * chance.normal()), norm))
    return found


def plain(usual: Usual, figure: Figure) -> bool:
    """As a row says it: what is not known is less than any figure."""
    return usual.plain(*(-math.inf if value is None else value for value in figure[1:]))


def spikes(figures: list[Figure], policy: SpikePolicy) -> int:
    """How many are found; fails where one is taken to be plain."""
    kept, usual, count = policy.baseline_steps + policy.run_steps, Usual(policy), 0
    for at, figure in enumerate(figures):
        found = spike(figures[max(0, at - kept) : at + 1], policy)
        count += found is not None
        assert not (found and plain(usual, figure)), (at, figure)
        usual.add(figure)
    return count


@pytest.mark.parametrize("policy", POLICIES)
def test_a_plain_step_is_no_spike(policy: SpikePolicy) -> None:
    assert sum(spikes(curve(seed, 1500), policy) for seed in range(6)) > 10


figures = (
    st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.floats(-10, 10) | st.integers(-3, 3).map(float)
)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(figures, figures.map(lambda x: x if x is None else abs(x))), min_size=20, max_size=90),
    st.sampled_from(
        [POLICIES[0], SpikePolicy(baseline_steps=16, run_steps=1), SpikePolicy(baseline_steps=18, run_steps=5)]
    ),
    st.floats(-5, 5),
)
def test_nor_is_it_among_whatever_figures(
    told: list[tuple[float | None, float | None]], policy: SpikePolicy, slope: float
) -> None:
    """Also with a loss that rises or falls throughout, so that the bounds lean on their trend."""
    spikes(
        [Figure(Step(n), None if loss is None else loss + slope * n, norm) for n, (loss, norm) in enumerate(told)],
        policy,
    )


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_nor_right_above_what_is_to_be_expected(data: st.DataObject) -> None:
    """Losses that know the rule, and stay as close to it as they can: between the steps at which the bounds are made anew, they take away
    what those were made of."""
    policy = SpikePolicy(baseline_steps=16)
    chance = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    slope, noise = data.draw(st.floats(-1, 1)), data.draw(st.sampled_from([0.0, 0.1, 1.0]))
    told = [Figure(Step(n), slope * n + noise * float(chance.normal()), 1.0) for n in range(24)]
    for height in data.draw(st.lists(st.floats(-1, 8), min_size=8, max_size=40)):
        told.append(Figure(Step(len(told)), slope * len(told) + noise * height, 1.0))
    spikes(told, policy)


def test_a_calm_training_is_hardly_ever_looked_at() -> None:
    chance, policy = np.random.default_rng(1), SpikePolicy()
    usual, found = Usual(policy), 0
    for step in range(2000):
        figure = Figure(Step(step), 2 + 3 * (step + 100) ** -0.3 + 0.05 * chance.normal(), 1 + abs(chance.normal()))
        found += plain(usual, figure)
        usual.add(figure)
    assert found > 0.98 * (2000 - policy.baseline_steps - policy.run_steps)


@pytest.mark.parametrize(
    "unknown", [(-math.inf, 1.0), (1.0, -math.inf), (math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0)]
)
def test_what_is_not_known_is_not_plain(unknown: tuple[float, float]) -> None:
    usual = Usual(SpikePolicy(baseline_steps=16))
    for step in range(40):
        usual.add(Figure(Step(step), 1.0, 1.0))
    assert usual.plain(1.0, 1.0)
    assert not usual.plain(*unknown)
    usual.add(Figure(Step(40), None, 1.0))
    assert not usual.plain(1.0, 1.0)
