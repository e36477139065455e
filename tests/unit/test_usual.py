"""What is taken to be plain without a further look holds no spike; and most of a calm training is."""

import numpy as np
import pytest

from mt_resilient.resilience.signals import Step
from mt_resilient.resilience.spikes import Figure, SpikePolicy, spike
from mt_resilient.resilience.usual import Usual


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


@pytest.mark.parametrize(
    "policy", [SpikePolicy(baseline_steps=16), SpikePolicy(baseline_steps=33), SpikePolicy(run_steps=1)]
)
def test_a_plain_step_is_no_spike(policy: SpikePolicy) -> None:
    kept = policy.baseline_steps + policy.run_steps
    spikes = 0
    for seed in range(6):
        usual, figures = Usual(policy), curve(seed, 1500)
        for at, figure in enumerate(figures):
            found = spike(figures[max(0, at - kept) : at + 1], policy)
            spikes += found is not None
            assert not (found and usual.plain(figure)), figure
            usual.add(figure)
    assert spikes > 10


def test_a_calm_training_is_hardly_ever_looked_at() -> None:
    chance, policy = np.random.default_rng(1), SpikePolicy()
    usual, plain = Usual(policy), 0
    for step in range(2000):
        figure = Figure(Step(step), 2 + 3 * (step + 100) ** -0.3 + 0.05 * chance.normal(), 1 + abs(chance.normal()))
        plain += usual.plain(figure)
        usual.add(figure)
    assert plain > 0.9 * (2000 - policy.baseline_steps)
