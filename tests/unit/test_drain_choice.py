"""Which snapshot goes to disk next."""

from dataclasses import replace

import pytest

from mt_resilient.checkpoint.arena.slot_header import Header, Stamp, State, due

WANTED = Header(state=State.SEALED, generation=1, step=10, world=1, durable=True)
LATER = replace(WANTED, step=20)


@pytest.mark.parametrize(
    ("slots", "already", "expected"),
    [
        ([WANTED], [], 10),
        ([WANTED, LATER], [], 20),
        ([WANTED, LATER], [LATER.stamp], 10),
        ([WANTED, replace(LATER, drained=True)], [], 10),
        ([WANTED, replace(LATER, durable=False)], [], 10),
        ([WANTED, replace(LATER, state=State.STAGED)], [], 10),
        ([WANTED, replace(LATER, state=State.STAGING)], [], 10),
        ([replace(WANTED, drained=True)], [], None),
        ([Header()], [], None),
        ([], [], None),
    ],
)
def test_one_rank(slots, already, expected):
    stamp = due([slots], 1, already)
    assert (stamp and stamp.step) == expected


def test_all_local_ranks_must_hold_it():
    assert due([[WANTED, LATER], [replace(WANTED, state=State.STAGED, rank=1)]], 2) == Stamp(1, 0, 10)
    assert due([[WANTED], [LATER]], 2) is None


def test_a_kill_between_two_marks_leaves_it_due():
    assert due([[replace(WANTED, drained=True)], [WANTED]], 2) == WANTED.stamp


def test_a_step_run_again_after_going_back_is_another_one():
    again = replace(WANTED, rewinds=1)
    assert due([[WANTED, again]], 1, [WANTED.stamp]) == again.stamp
