"""Which copy leaves, what a keeper does with it, and from where each rank's state comes back."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mt_resilient.checkpoint.header import Header, Stamp, State
from mt_resilient.checkpoint.tiers import Answer, Held, Known, Tier, admit, nearest, newest, whole


def sealed(step: int, rank: int = 0, *, generation: int = 1, rewinds: int = 0, state: State = State.SEALED) -> Header:
    return Header(state=state, generation=generation, rewinds=rewinds, step=step, rank=rank, world=4)


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
            20,
        ),  # one seal proves all
        ([[sealed(10), sealed(20)], [sealed(10, 1), sealed(20, 1, state=State.STAGING)]], None, 10),
        ([[sealed(10), sealed(20)], [sealed(20, 1), sealed(30, 1)]], None, 20),
        ([[sealed(10)], [sealed(20, 1)]], None, None),
        ([[FREE]], None, None),
        ([], None, None),
    ],
)
def test_the_newest_complete_one_leaves_once(rows, last, expected):
    stamp = newest(rows, len(rows), None if last is None else Stamp(1, 0, last))
    assert (stamp and stamp.step) == expected


def test_after_going_back_a_smaller_step_leaves():
    assert newest([[sealed(12, rewinds=1)]], 1, Stamp(1, 0, 20)) == Stamp(1, 1, 12)


# What is kept


@pytest.mark.parametrize(
    ("row", "offered", "answer", "slot"),
    [
        ([FREE, FREE], sealed(10), Answer.TAKE, 0),
        ([sealed(10), FREE], sealed(20), Answer.TAKE, 1),
        ([sealed(10), sealed(20)], sealed(30), Answer.TAKE, 0),
        ([sealed(30), sealed(20)], sealed(40), Answer.TAKE, 1),
        ([sealed(10), sealed(20, state=State.STAGING)], sealed(30), Answer.TAKE, 1),
        ([sealed(10), sealed(20, state=State.STAGED)], sealed(20), Answer.TAKE, 1),
        ([sealed(10), sealed(20)], sealed(20), Answer.HAVE, -1),
        ([sealed(10), sealed(20)], sealed(10), Answer.HAVE, -1),
        ([sealed(20), FREE], sealed(10), Answer.NO, -1),
        ([sealed(20), FREE], sealed(10, generation=2), Answer.TAKE, 1),
        ([sealed(20), FREE], sealed(10, rewinds=1), Answer.TAKE, 1),
        ([sealed(20, generation=2), FREE], sealed(30), Answer.NO, -1),
        ([sealed(20), sealed(5, generation=2, state=State.STAGING)], sealed(30), Answer.NO, -1),
        ([sealed(20, 3), FREE], sealed(30, 0), Answer.NO, -1),
        ([sealed(20, 3), FREE], sealed(30, 0, generation=2), Answer.TAKE, 1),
    ],
)
def test_one_rank(row, offered, answer, slot):
    admission = admit([row], 0, 1, offered)
    assert (admission.answer, admission.slot) == (answer, slot)
    assert bool(admission.reason) == (answer is Answer.NO)


def test_more_ranks_than_rows_are_refused():
    assert "copies of 1 ranks" in admit([[FREE, FREE]], 0, 2, sealed(1)).reason


def test_a_broken_stream_never_costs_the_copy_that_all_have():
    """Rank 0's part of step 20 came, rank 1's did not; then step 30 comes."""
    rows = [[sealed(10, 0), sealed(20, 0)], [sealed(10, 1), sealed(20, 1, state=State.STAGING)]]
    assert admit(rows, 0, 2, sealed(30, 0)).slot == 1, "not the older one: it is part of step 10"
    assert admit(rows, 1, 2, sealed(30, 1)).slot == 1


offers = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans()), max_size=60)


@given(offers, st.integers(1, 3))
def test_whatever_comes_and_breaks_the_newest_complete_copy_stays(events, ranks):
    """Each event: how many further steps the source has made, the row that it sends, whether the stream breaks."""
    rows = [[FREE, FREE] for _ in range(ranks)]
    step, best = 0, None
    for further, row, breaks in events:
        step, row = step + further, row % ranks
        offered = sealed(step, row)
        admission = admit(rows, row, ranks, offered)
        if admission.answer is Answer.TAKE:
            rows[row][admission.slot] = replace(offered, state=State.STAGING if breaks else State.SEALED)
        found = max(whole(rows), default=None)
        assert best is None or (found is not None and found >= best)
        best = found


# The way back

A, B, C = Stamp(1, 0, 10), Stamp(1, 0, 20), Stamp(2, 0, 15)
OWN, BUDDY, DURABLE = Tier.OWN, Tier.BUDDY, Tier.DURABLE


@pytest.mark.parametrize(
    ("ranks", "known", "stamp", "tiers"),
    [
        ([{OWN: [A, B]}, {OWN: [A, B]}], Known.YES, B, [OWN, OWN]),
        ([{OWN: [A, B]}, {OWN: [A], BUDDY: [B]}], Known.YES, B, [OWN, BUDDY]),
        ([{OWN: [A, B]}, {OWN: [], BUDDY: [B], DURABLE: [A, B]}], Known.YES, B, [OWN, BUDDY]),
        ([{OWN: [A, B]}, {OWN: [], BUDDY: [A], DURABLE: [A]}], Known.YES, A, [OWN, BUDDY]),
        ([{OWN: [B], DURABLE: [A]}, {BUDDY: [], DURABLE: [A]}], Known.YES, A, [DURABLE, DURABLE]),
        ([{OWN: [B, C]}, {BUDDY: [B, C]}], Known.YES, C, [OWN, BUDDY]),  # the later lineage, though its step is smaller
        ([{OWN: [B]}, {OWN: [A]}], Known.NO, None, []),
        ([{OWN: [B]}, {}], Known.NO, None, []),
        ([], Known.NO, None, []),
        # a newer one may still turn up
        ([{OWN: [A, B]}, {OWN: [A], BUDDY: None}], Known.NOT_YET, A, [OWN, OWN]),
        ([{OWN: [A, B]}, {BUDDY: None}], Known.NOT_YET, None, []),
        ([{OWN: [A], BUDDY: None}, {OWN: [A], BUDDY: None}], Known.NOT_YET, A, [OWN, OWN]),
        ([{OWN: None}], Known.NOT_YET, None, []),
        # whatever turns up, the answer is the same
        ([{OWN: [A]}, {OWN: [A], BUDDY: None}], Known.YES, A, [OWN, OWN]),
        ([{OWN: [B]}, {BUDDY: None, DURABLE: [B]}], Known.YES, B, [OWN, DURABLE]),  # a nearer tier is not waited for
        ([{OWN: []}, {BUDDY: None}], Known.NO, None, []),
        ([{OWN: [A]}, {OWN: [B]}, {BUDDY: None}], Known.NO, None, []),
    ],
)
def test_where_each_rank_goes_back_to(ranks: list[Held], known, stamp, tiers):
    found = nearest(ranks)
    assert (found.known, found.stamp, list(found.tiers)) == (known, stamp, tiers)
    assert found.reason


def test_the_reason_says_where_from():
    found = nearest([{OWN: [B]}, {BUDDY: [B]}, {BUDDY: [B]}])
    assert found.reason == "step 20: own memory for 1, the buddy's memory for 2 of 3 ranks"


stamps = st.lists(st.sampled_from([A, B, C]), max_size=3)
holdings = st.dictionaries(st.sampled_from(Tier), st.none() | stamps)


@given(st.lists(holdings, min_size=1, max_size=4), st.data())
def test_an_answer_stays_whatever_turns_up(ranks, data):
    found = nearest(ranks)
    told = [{tier: data.draw(stamps) if held is None else held for tier, held in rank.items()} for rank in ranks]
    final = nearest(told)
    assert final.known is not Known.NOT_YET
    if found.known is not Known.NOT_YET:
        assert (final.known, final.stamp) == (found.known, found.stamp)
    for rank, tier in enumerate(final.tiers):
        assert final.stamp in told[rank][tier]
