"""The names of attempts: each name stands for one attempt, and its numbers fit into a slot's header."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mt_resilient.checkpoint.arena.slot_header import Stamp
from mt_resilient.checkpoint.backend.paths import Attempt

MOST = (1 << 60) - 1


def at(*stamp: int) -> Attempt:
    return Attempt(run="aaaaaaaa", stamp=Stamp(*stamp))


@settings(deadline=None)
@given(
    st.text("0123456789abcdef", min_size=8, max_size=8),
    st.builds(Stamp, st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**15)),
)
@example("5f0c91aa", Stamp(MOST, 1 << 20, MOST))
def test_a_name_is_parsed_to_the_attempt_that_it_was_made_from(run: str, stamp: Stamp) -> None:
    attempt = Attempt(run=run, stamp=stamp)
    assert Attempt.parse(str(attempt)) == attempt


@pytest.mark.parametrize(
    "name",
    [
        "",
        "COMMIT",
        "000001-g1-aaaaaaaa0000",
        "0000000001-g01-aaaaaaaa0000",
        "0000000001-g1-aaaaaaaa00000",
        *map(str, (at(MOST + 1, 0, 1), at(1, MOST + 1, 1), at(1, 0, 10**200))),
    ],
)
def test_other_names_and_numbers_beyond_a_header_are_no_attempts(name: str) -> None:
    assert Attempt.parse(name) is None


def test_names_sort_by_step() -> None:
    assert str(at(3, 0, 100)) == "0000000100-g3-aaaaaaaa0000"
    assert sorted([str(at(1, 0, 20)), str(at(1, 0, 3))]) == [str(at(1, 0, 3)), str(at(1, 0, 20))]
