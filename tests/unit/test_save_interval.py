"""How often the state is kept: limits that hold the promise."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mt_resilient.checkpoint.durable.save_interval import (
    DEVICE_HOURS_BETWEEN_FAILURES,
    MOST_S,
    SHARE,
    SnapshotPolicy,
    durable_interval_s,
    stride,
)
from mt_resilient.resilience.errors import UsageError

LEAST = {"every_steps": 0, "durable_every_steps": 0, "slots": 3, "reach_steps": 1, "keep": 1}


def test_the_least_values_are_allowed() -> None:
    assert vars(SnapshotPolicy(**LEAST)).items() >= LEAST.items()


@pytest.mark.parametrize("name", LEAST)
def test_values_below_the_least_are_refused_by_name(name: str) -> None:
    value = LEAST[name] - 1
    with pytest.raises(UsageError, match=rf"^snapshots\.{name} is {value}; it must be at least {LEAST[name]}$"):
        SnapshotPolicy(**{name: value})


@pytest.mark.parametrize(
    ("cost_s", "step_s", "expected"),
    [
        (0.0, 1.0, 1),  # not measured yet
        (0.0015, 0.267, 1),  # an H200: hidden
        (0.0027, 0.267, 2),
        (0.069, 1.0, 12),
        (1.0, 0.2, 300),  # a minute is the most
        (10.0, 100.0, 1),  # and a step, if it is longer
    ],
)
def test_the_stride_keeps_the_cost_below_its_share(cost_s: float, step_s: float, expected: int) -> None:
    assert stride(cost_s, step_s) == expected


@given(st.floats(1e-4, 100), st.floats(1e-3, 1000))
def test_a_stride_costs_at_most_its_share_unless_a_fault_would_lose_more_than_a_minute(
    cost_s: float, step_s: float
) -> None:
    steps = stride(cost_s, step_s)
    assert steps == 1 or steps * step_s <= MOST_S[0] + 1e-6
    assert cost_s <= SHARE * steps * step_s * 1.001 or (steps + 1) * step_s > MOST_S[0]


def test_the_durable_interval_follows_young_s_formula_within_its_limits() -> None:
    hour = 3600.0
    prior = DEVICE_HOURS_BETWEEN_FAILURES * hour
    assert durable_interval_s(2.0, 16_384, 0, 0.0) == pytest.approx(math.sqrt(2 * 2.0 * prior / 16_384))  # 211 s
    assert durable_interval_s(0.5, 8, 0, 0.0) == MOST_S[1], "never longer than that"
    assert durable_interval_s(300.0, 16_384, 50, hour) == 600.0, "nor so short that it is always writing"
    calm, stormy = (durable_interval_s(1.0, 1024, failures, 10 * hour) for failures in (0, 20))
    assert stormy == pytest.approx(calm / math.sqrt(21)), "what is seen counts"


@pytest.mark.parametrize("limit", [-1.0, float("nan"), float("inf")])
def test_a_rate_limit_that_is_no_limit_is_refused(limit: float) -> None:
    with pytest.raises(UsageError, match=r"max_write_mb_per_s"):
        SnapshotPolicy(max_write_mb_per_s=limit)
