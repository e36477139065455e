"""How often the state is kept: limits that hold the promise."""

import pytest

from mt_resilient.checkpoint.cadence import SnapshotPolicy
from mt_resilient.resilience.errors import UsageError

LEAST = {"every_steps": 1, "durable_every_steps": 1, "slots": 3, "keep": 1}


def test_the_least_that_works_is_allowed() -> None:
    assert vars(SnapshotPolicy(**LEAST)) == LEAST


def test_the_default_costs_one_step() -> None:
    assert SnapshotPolicy().every_steps == 1


@pytest.mark.parametrize("name", LEAST)
@pytest.mark.parametrize("too_little", [0, -1])
def test_less_is_refused_by_name(name: str, too_little: int) -> None:
    value = too_little if LEAST[name] == 1 else LEAST[name] - 1
    with pytest.raises(UsageError, match=rf"^snapshots\.{name} is {value}; it must be at least {LEAST[name]}$"):
        SnapshotPolicy(**{name: value})
