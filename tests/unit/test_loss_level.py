"""Which losses have diverged, which are high for a while, and where it began. `benchmarks/judgement.py` has the large corpus."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from mt_resilient.resilience.inprocess.loss_level import Level, Outcome, judge
from mt_resilient.resilience.inprocess.loss_spike import Figure, Finding, SpikePolicy
from mt_resilient.resilience.model.cause import Kind
from mt_resilient.resilience.model.types import Step

POLICY = SpikePolicy()
AT = 1500
"""The step from which on a training is hurt."""
Losses = NDArray[np.float64]


def played(losses: Losses, norms: Losses | None = None) -> tuple[list[Finding], list[Outcome]]:
    """Return what is found, up to the first divergence, and how the watches ended."""
    found: list[Finding] = []
    ended: list[Outcome] = []
    figures: list[Figure] = []
    level = Level()
    for step, loss in enumerate(losses.tolist()):
        norm = None if norms is None else float(norms[step])
        figures = [
            *figures[-POLICY.baseline_steps - POLICY.run_steps - POLICY.patience_steps :],
            Figure(Step(step), None if np.isnan(loss) else loss, norm),
        ]
        watched = level.watch
        finding, level = judge(figures, level, POLICY)
        if watched and not level.watch:
            ended.append(level.outcome)
        if finding:
            found.append(finding)
            if finding.kind is Kind.LOSS_DIVERGENCE:
                break
    return found, ended


def training(seed: int, steps: int = 2000) -> Losses:
    """A loss that falls by a power law from 11 towards 2.8, with normal noise of 0.08."""
    chance = np.random.default_rng(seed)
    return 2.8 + 8.2 * (1 + np.arange(steps) / 30) ** -0.35 + chance.normal(0, 0.08, steps)


def after(losses: Losses) -> NDArray[np.float64]:
    """Steps since the training was hurt; 0 before."""
    return np.maximum(0.0, np.arange(len(losses)) - AT)


HEALTHY: dict[str, Callable[[Losses], Losses]] = {
    "as it is": lambda losses: losses,
    "harder data for 20 steps, 3 sigma": lambda losses: losses + 0.24 * (np.arange(len(losses)) % 500 > 480),
    "harder data for 30 steps, 7 sigma": lambda losses: losses + 0.56 * (np.arange(len(losses)) % 700 > 670),
    "other data from here on": lambda losses: losses + 0.4 * (after(losses) > 0),
    "a jump that comes back": lambda losses: losses + 2 * np.exp(-after(losses) / 15) * (after(losses) > 0),
    "a loss near zero": lambda losses: (
        1e-6 + 1.5 * np.exp(-np.arange(len(losses)) / 100) * np.exp(losses - losses.mean())
    ),
    "a loss that wanders": lambda losses: (
        1
        + 0.3 * np.sin(np.arange(len(losses)) / 180)
        + 0.2 * np.random.default_rng(len(losses)).normal(size=len(losses))
    ),
    "a critic's loss, which falls below zero and rises while the generator learns": lambda losses: (
        -6 * (1 - np.exp(-np.arange(len(losses)) / 40)) * np.exp(-np.maximum(0, np.arange(len(losses)) - 80) / 300)
        + 0.15 * np.random.default_rng(1).normal(size=len(losses))
    ),
    "a KL term that grows from 0 as the policy leaves its reference": lambda losses: (
        0.02
        * (1 - np.exp(-np.arange(len(losses)) / 300))
        * np.exp(0.3 * np.random.default_rng(int(1e6 * losses[0])).normal(size=len(losses)))
    ),
    "a hinge that is 0 for a while": lambda losses: np.where(
        np.arange(len(losses)) < AT,
        0.0,
        np.maximum(0.0, np.random.default_rng(int(1e6 * losses[0])).normal(0.05, 0.02, len(losses))),
    ),
    "one batch in fifty is hard": lambda losses: losses + 0.8 * (np.arange(len(losses)) % 50 == 7),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_training_is_never_judged_diverged(name: str) -> None:
    for seed in range(2):
        found, ended = played(HEALTHY[name](training(seed)))
        assert [each for each in found if each.kind is Kind.LOSS_DIVERGENCE] == []
        assert len(ended) >= len(found) - 1


SICK: dict[str, tuple[Callable[[Losses], Losses], int, int]] = {
    "a jump of 1 that stays": (lambda losses: losses + (after(losses) > 0), 35, 3),
    "a jump of 3 that stays": (lambda losses: losses + 3.0 * (after(losses) > 0), 35, 3),
    "the loss of guessing": (lambda losses: np.where(after(losses) > 0, 10.82, losses), 35, 3),
    "a slow rise over 200 steps": (lambda losses: losses + np.minimum(3, after(losses) / 70), 100, 40),
}
"""How it is hurt, steps until it is found at most, steps by which the onset may be late."""


@pytest.mark.parametrize("name", SICK)
def test_a_loss_that_stays_high_is_found_and_its_onset_too(name: str) -> None:
    hurt, until, late = SICK[name]
    for seed in range(2):
        found, _ = played(hurt(training(seed)))
        assert found[-1].kind is Kind.LOSS_DIVERGENCE
        assert found[-1].seen <= AT + until
        assert AT - 10 <= found[-1].onset <= AT + 1 + late


@pytest.mark.parametrize(
    ("unknown", "until"),
    [(lambda steps: steps % 20 == 0, 40), (lambda steps: steps % 3 > 0, 110)],
    ids=["a loss scaler skips a step now and then", "the script reports every third step"],
)
def test_a_loss_that_stays_high_is_found_though_some_steps_have_no_loss(
    unknown: Callable[[Losses], NDArray[np.bool_]], until: int
) -> None:
    losses = training(0)
    found, _ = played(np.where(unknown(np.arange(len(losses))), np.nan, losses + 2.0 * (after(losses) > 0)))
    assert found[-1].kind is Kind.LOSS_DIVERGENCE
    assert AT - 10 <= found[-1].onset <= found[-1].seen <= AT + until


RISING: dict[str, Losses] = {
    "it doubles every 2,500 steps": np.where(
        (at := np.arange(12_000)) < 300, 0.3 + 0.7 * np.exp(-at / 40), 0.3 * 2 ** ((at - 300) / 2500)
    )
    * np.exp(np.random.default_rng(0).normal(0, 0.5, len(at))),
    "it is reported at odd steps": np.where(
        at % 2 == 0,
        np.nan,
        (50 * np.exp(-at / 100) + 0.5 + 8 * (1 - np.exp(-np.maximum(0, at - 2000) / 2500)))
        * np.exp(np.random.default_rng(0).normal(0, 0.3, len(at))),
    ),
}


@pytest.mark.parametrize("name", RISING)
def test_a_loss_that_rises_over_thousands_of_steps_is_not_judged_diverged(name: str) -> None:
    found, _ = played(RISING[name])
    assert [each for each in found if each.kind is Kind.LOSS_DIVERGENCE] == []


@pytest.mark.parametrize("shift", [0.1, 0.2, 0.3])
def test_a_loss_that_stays_high_is_found_long_after_a_small_shift(shift: float) -> None:
    """The loss is never again as low as before the shift."""
    at = np.arange(3400)
    losses = 3 + 8 * np.exp(-at / 200) + np.random.default_rng(0).normal(0, 0.05, len(at)) + shift * (at >= 1200)
    found, _ = played(losses + 2.0 * (at >= 2600))
    assert found[-1].kind is Kind.LOSS_DIVERGENCE
    assert 2600 <= found[-1].onset <= found[-1].seen <= 2640


def test_a_rise_that_is_too_small_to_act_is_told_and_its_end_too() -> None:
    losses = training(1)
    found, ended = played(losses + 0.5 * (after(losses) > 0))
    assert [each.kind for each in found] == [Kind.LOSS_SPIKE]
    assert ended == [Outcome.STAYS]


@pytest.mark.parametrize(("norm", "kinds"), [(3.8e-4, []), (50.0, [Kind.GRADIENT_SPIKE])])
def test_a_gradient_counts_where_it_is_larger_than_all_before(norm: float, kinds: list[Kind]) -> None:
    losses = training(1, 1000)
    norms = 1e-6 + 10 * np.exp(-np.arange(1000) / 20)
    norms[600] = norm
    found, ended = played(losses, norms)
    assert [each.kind for each in found] == kinds
    assert ended == [Outcome.BACK] * len(kinds), "the loss did not follow"


def test_a_jump_is_found_where_the_loss_had_not_fallen_much() -> None:
    """As in fine-tuning. Thirty times the noise is more than such a loss wanders."""
    losses = 1.5 + np.random.default_rng(1).normal(0, 0.2, 600)
    found, _ = played(losses + 9.0 * (np.arange(600) > 400))
    assert found[-1].kind is Kind.LOSS_DIVERGENCE
