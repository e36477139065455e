"""Training curves for `judgement.py`: synthetic ones, healthy and sick, and recorded ones from files."""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
SIGMA = 0.08
"""Noise of the loss in the recorded trainings of 124 M parameters."""


class Curve(NamedTuple):
    losses: Numbers
    norms: Numbers
    """Gradient norms; NaN: not recorded."""


def recorded(directory: Path) -> Iterator[tuple[str, Curve]]:
    """Yield the curves in files `*.csv` and `*.csv.gz`, with the columns step, loss and grad_norm (which may be empty)."""
    for path in sorted([*directory.glob("*.csv"), *directory.glob("*.csv.gz")]):
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
            rows = [(float(row["loss"]), float(row.get("grad_norm") or "nan")) for row in csv.DictReader(file)]
        finite = [row for row in rows if math.isfinite(row[0])]
        yield path.name.removesuffix(".gz").removesuffix(".csv"), Curve(*np.array(finite).T)


def _noise(kind: str, chance: np.random.Generator, steps: int) -> Numbers:
    """Noise with a standard deviation of `SIGMA`."""
    match kind:
        case "normal":
            return chance.normal(0, SIGMA, steps)
        case "t5":
            return chance.standard_t(5, steps) * SIGMA / math.sqrt(5 / 3)
        case "log-normal":
            drawn = np.exp(chance.normal(0, 0.4, steps))
            return np.asarray((drawn - drawn.mean()) / drawn.std() * SIGMA)
    drawn = chance.normal(0, SIGMA * 0.6, steps)  # correlated from step to step by 0.8
    for at in range(1, steps):
        drawn[at] += 0.8 * drawn[at - 1]
    return drawn


NOISES = "normal", "t5", "log-normal", "correlated"


def training(chance: np.random.Generator, steps: int, noise: str = "normal") -> Curve:
    """A loss that falls by a power law from 11 towards 2.8, and the gradient norm of such a training."""
    at = np.arange(steps)
    losses = 2.8 + 8.2 * (1 + at / 30) ** -0.35 + _noise(noise, chance, steps)
    return Curve(losses, 0.3 * np.exp(chance.normal(0, 0.15, steps)) * (1 + 20 * np.exp(-at / 40)))


def healthy(chance: np.random.Generator, steps: int) -> Iterator[tuple[str, Curve]]:
    at = np.arange(steps)
    for noise in NOISES:
        yield f"power law, {noise} noise", training(chance, steps, noise)
    since = at % 2000
    warm = np.where(at >= 2000, 0.35 * np.exp(-since / 150) * (1 - np.exp(-since / 20)), 0)
    changes = {
        "learning rate returns every 2000 steps": warm,
        "one batch in 50 is hard by 10 sigma": 0.8 * (chance.random(steps) < 1 / 50),
        "20 batches are hard by 3 sigma, every 500": 0.24 * (at % 500 > 480),
        "30 batches are hard by 7 sigma, every 700": 0.56 * (at % 700 > 670),
        "curriculum: other data every 3000 steps": np.array([0.0, 0.25, 0.05, 0.45, 0.0])[at // 3000 % 5],
        "jumps by 2 that come back within 50 steps": 2 * np.exp(-(at % 1500) / 15) * (at >= 1500),
    }
    for name, change in changes.items():
        losses, norms = training(chance, steps)
        yield name, Curve(losses + change, norms)
    falling = (1.5 * np.exp(-at / 300) + 1e-6) * np.exp(chance.normal(0, 0.5, steps))
    norms = np.sqrt(falling) * 1e-3 * np.exp(chance.normal(0, 0.5, steps))
    norms[chance.integers(2000, steps, 3)] *= 240
    yield "loss near zero, with gradients 240 times the usual", Curve(falling, norms)
    wanders = np.cumsum(chance.normal(0, 0.02, steps)) + chance.normal(0, 0.3, steps)
    yield "a policy's loss wanders", Curve(wanders, np.exp(chance.standard_t(3, steps) * 0.3))
    value = (
        50 * np.exp(-at / 100) + 0.5 + 4 * (1 - np.exp(-np.maximum(0, at - 3000) / 1500)) + 2 * np.sin(at / 700) ** 2
    )
    yield "the loss of a value function rises", Curve(value * np.exp(chance.normal(0, 0.3, steps)), np.ones(steps))
    for length, sigma in ((100, 0.1), (300, 0.3), (1000, 0.3), (3000, 0.6)):
        drawn = 0.02 * (1 - np.exp(-at / length)) * np.exp(chance.normal(0, sigma, steps))
        yield f"a KL term grows from 0 over {length} steps, noise {sigma:g}", Curve(drawn, np.ones(steps))
    hinge = np.where(at < 300, 0, np.maximum(0, chance.normal(0.05, 0.02, steps)))
    yield "a hinge is 0 for 300 steps", Curve(hinge, np.ones(steps))
    epochs = 1.8 - 0.25 * np.minimum(at // 400, 4) + chance.normal(0, 0.25, steps)
    yield "fine-tuning over epochs", Curve(epochs, np.exp(chance.normal(0, 0.3, steps)))
    waves = 1.2 + 0.4 * np.sin(at / 180) + 0.2 * np.sin(at / 37) + chance.normal(0, 0.2, steps)
    yield "adversarial training oscillates", Curve(waves, np.ones(steps))


SICK: dict[str, Callable[[Numbers, Numbers], Numbers]] = {
    "jump of 1 that stays": lambda losses, since: losses + (since > 0),
    "jump of 3 that stays": lambda losses, since: losses + 3.0 * (since > 0),
    "rises by 3 over 50 steps": lambda losses, since: losses + np.minimum(3, since * 3 / 50),
    "rises by 3 over 200 steps": lambda losses, since: losses + np.minimum(3, since * 3 / 200),
    "rises by 3 over 500 steps": lambda losses, since: losses + np.minimum(3, since * 3 / 500),
    "grows exponentially": lambda losses, since: losses + 0.02 * (np.exp(np.minimum(since / 40, 6)) - 1),
    "the gradient grows, then the loss jumps": lambda losses, since: losses + 4.0 * (since > 20),
    "the loss of guessing": lambda losses, since: np.where(since > 0, 10.82, losses),
}
"""How a training is disturbed. since: the number of steps since the disturbance, 0 before it."""
TOLD = "jump of 6 sigma that stays", "wrong weight that is learned again"


def told(name: str, losses: Numbers, since: Numbers) -> Numbers:
    """A training with a disturbance so small that the ranks only report it."""
    lasting = np.exp(-since / 400) if name == TOLD[1] else 1.0
    return losses + 6 * SIGMA * lasting * (since > 0)
