"""Names of attempts: there and back, and no number that a slot's header could not say."""

import pytest

from mt_resilient.checkpoint.arena.slot_header import Stamp
from mt_resilient.checkpoint.backend.paths import Attempt


@pytest.mark.parametrize("stamp", [Stamp(0, 0, 0), Stamp(12, 3, 45), Stamp((1 << 60) - 1, 1 << 20, (1 << 60) - 1)])
def test_there_and_back(stamp: Stamp) -> None:
    attempt = Attempt(run="5f0c91aa", stamp=stamp)
    assert Attempt.parse(str(attempt)) == attempt


@pytest.mark.parametrize("large", [Stamp(1 << 60, 0, 1), Stamp(1, 1 << 60, 1), Stamp(1, 0, 10**200)])
def test_a_number_beyond_all_others_is_no_attempt(large: Stamp) -> None:
    assert Attempt.parse(str(Attempt(run="5f0c91aa", stamp=large))) is None
