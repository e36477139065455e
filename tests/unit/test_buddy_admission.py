"""Which copy leaves, what a keeper does with it, and where it goes when it comes back."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mt_resilient.checkpoint.arena.slot_header import Header, Stamp, State
from mt_resilient.checkpoint.buddy.admission import admit, newest, rooms, whole
from mt_resilient.checkpoint.buddy.protocol import Word


def sealed(step: int, rank: int = 0, *, generation: int = 1, rewinds: int = 0, state: State = State.SEALED) -> Header:
    return Header(state=state, generation=generation, rewinds=rewinds, step=step, rank=rank, world=4, marked=True)


FREE = Header()

# What leaves


@pytest.mark.parametrize(
    ("rows", "last", "expected"),
    [
        ([[sealed(10), sealed(20)]], None, 20),
        ([[sealed(10), sealed(20)]], 10, 20),
        ([[sealed(10), sealed(20)]], 20, None),
        ([[sealed(10), sealed(20, state=State.STAGED)]], 10, None),
        (
            [[sealed(10), sealed(20)], [sealed(10, 1), sealed(20, 1, state=State.STAGED)]],
            None,
            10,
        ),  # one seal proves all, but what leaves is sealed
        ([[sealed(10), sealed(20)], [sealed(10, 1), sealed(20, 1, state=State.STAGING)]], None, 10),
        ([[sealed(10), sealed(20)], [sealed(20, 1), sealed(30, 1)]], None, 20),
        ([[sealed(10)], [sealed(20, 1)]], None, None),
        ([[FREE]], None, None),
        ([], None, None),
    ],
)
def test_the_newest_snapshot_that_all_ranks_sealed_is_sent_once(rows, last, expected):
    stamp = newest(rows, len(rows), None if last is None else Stamp(1, 0, last))
    assert (stamp and stamp.step) == expected


def test_after_going_back_an_earlier_step_is_sent():
    assert newest([[sealed(12, rewinds=1)]], 1, Stamp(1, 0, 20)) == Stamp(1, 1, 12)


def test_a_snapshot_without_a_mark_is_not_sent():
    assert newest([[sealed(10), replace(sealed(20), marked=False)]], 1, None) == Stamp(1, 0, 10)


# What is kept


@pytest.mark.parametrize(
    ("row", "offered", "answer", "slot"),
    [
        ([FREE, FREE], sealed(10), Word.TAKE, 0),
        ([sealed(10), FREE], sealed(20), Word.TAKE, 1),
        ([sealed(10), sealed(20)], sealed(30), Word.TAKE, 0),
        ([sealed(30), sealed(20)], sealed(40), Word.TAKE, 1),
        ([sealed(10), sealed(20, state=State.STAGING)], sealed(30), Word.TAKE, 1),
        ([sealed(10), sealed(20, state=State.STAGED)], sealed(20), Word.TAKE, 1),
        ([sealed(10), sealed(20)], sealed(20), Word.HAVE, -1),
        ([sealed(10), sealed(20)], sealed(10), Word.HAVE, -1),
        ([sealed(20), FREE], sealed(10), Word.NO, -1),
        ([sealed(20), FREE], sealed(10, generation=2), Word.TAKE, 1),
        ([sealed(20), FREE], sealed(10, rewinds=1), Word.TAKE, 1),
        ([sealed(20, generation=2), FREE], sealed(30), Word.NO, -1),
        ([sealed(20), sealed(5, generation=2, state=State.STAGING)], sealed(30), Word.NO, -1),
        ([sealed(20, 3), FREE], sealed(30, 0), Word.NO, -1),
        ([sealed(20, 3), FREE], sealed(30, 0, generation=2), Word.TAKE, 1),
    ],
)
def test_what_a_keeper_answers_to_an_offer(row, offered, answer, slot):
    admission = admit([row], 0, 1, offered)
    assert (admission.answer, admission.slot) == (answer, slot)
    assert bool(admission.reason) == (answer is Word.NO)


def test_more_ranks_than_rows_are_refused():
    assert "copies of 1 ranks" in admit([[FREE, FREE]], 0, 2, sealed(1)).reason


def test_a_broken_transfer_never_costs_the_copy_that_is_complete():
    """Rank 0's part of step 20 came, rank 1's did not; then step 30 comes."""
    rows = [[sealed(10, 0), sealed(20, 0)], [sealed(10, 1), sealed(20, 1, state=State.STAGING)]]
    assert admit(rows, 0, 2, sealed(30, 0)).slot == 1, "not the older one: it is part of step 10"
    assert admit(rows, 1, 2, sealed(30, 1)).slot == 1


offers = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans()), max_size=60)


@given(offers, st.integers(1, 3))
def test_the_newest_complete_copy_stays_whatever_arrives_or_breaks_off(events, ranks):
    """Each event: how many further steps the source has made, the row that it sends, whether the stream breaks."""
    rows = [[FREE, FREE] for _ in range(ranks)]
    step, best = 0, None
    for further, row, breaks in events:
        step, row = step + further, row % ranks
        offered = sealed(step, row)
        admission = admit(rows, row, ranks, offered)
        if admission.answer is Word.TAKE:
            rows[row][admission.slot] = replace(offered, state=State.STAGING if breaks else State.SEALED)
        found = max(whole(rows), default=None)
        assert best is None or (found is not None and found >= best)
        best = found


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([sealed(10), FREE], [1, 0]),
        ([sealed(20), sealed(10)], [1, 0]),
        ([sealed(10), sealed(20, state=State.STAGING)], [1, 0]),
        ([sealed(20), sealed(10), sealed(30, state=State.STAGING), FREE], [3, 2, 1, 0]),
    ],
)
def test_a_fetched_copy_takes_an_empty_slot_or_the_oldest(row, expected):
    assert rooms(row) == expected
