"""What may go from the disk, and how attempts are named."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_resilient.checkpoint.header import Stamp
from mt_resilient.checkpoint.layout import Attempt
from mt_resilient.checkpoint.retention import dead, surplus

stamps = st.builds(Stamp, st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**15))
attempts = st.builds(Attempt, run=st.text("0123456789abcdef", min_size=8, max_size=8), stamp=stamps)


def at(step: int, generation: int = 1, rewinds: int = 0, run: str = "aaaaaaaa") -> Attempt:
    return Attempt(run=run, stamp=Stamp(generation, rewinds, step))


@settings(deadline=None)
@given(attempts)
def test_a_name_stands_for_one_attempt(attempt):
    assert Attempt.parse(str(attempt)) == attempt


@pytest.mark.parametrize(
    "name", ["", "COMMIT", "000001-g1-aaaaaaaa0000", "0000000001-g01-aaaaaaaa0000", "0000000001-g1-aaaaaaaa00000"]
)
def test_other_directories_are_no_attempts(name):
    assert Attempt.parse(name) is None


def test_names_sort_as_steps_do():
    assert str(at(100, generation=3)) == "0000000100-g3-aaaaaaaa0000"
    assert sorted([str(at(20)), str(at(3))]) == [str(at(3)), str(at(20))]


@settings(deadline=None)
@given(st.lists(attempts), st.integers(-3, 5))
def test_the_newest_stay_and_the_last_one_always(newest_first, keep):
    going = surplus(newest_first, keep)
    staying = newest_first[: len(newest_first) - len(going)]
    assert [*staying, *going] == newest_first
    assert len(staying) == min(max(keep, 1), len(newest_first))


@pytest.mark.parametrize(
    ("remains", "gone"),
    [
        (at(20, run="bbbbbbbb"), True),
        (at(20, generation=0), True),
        (at(20, generation=2), False),
        (at(9), True),
        (at(8), False),
        (at(10), False),
        (at(20), False),
        (at(5, rewinds=1), False),
    ],
)
def test_remains_that_nobody_will_commit(remains, gone):
    assert dead([remains], at(10), {Stamp(1, 0, 8), Stamp(1, 0, 10)}) == ([remains] if gone else [])
