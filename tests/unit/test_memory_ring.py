"""Which older snapshots memory keeps: a table, and long histories of ranks that stage, seal, write to disk and lose some."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mt_resilient.checkpoint.arena.memory_ring import AT_WORK, kept, marks
from mt_resilient.checkpoint.arena.slot_header import Header, State, complete, overwrite_order

REACHES = st.integers(1, 300)


@pytest.mark.parametrize(
    ("newest", "places", "expected"),
    [
        (350, 0, set()),
        (350, 1, {300}),
        (350, 2, {200, 300}),
        (350, 3, {200, 300, 350}),
        (349, 3, {200, 250, 300}),
        (349, 4, {200, 250, 300, 325}),
        (30, 2, {-100, 0}),
    ],
)
def test_marks_are_the_last_two_multiples_of_each_period(newest: int, places: int, expected: set[int]) -> None:
    assert marks(newest, places, 100) == expected


@pytest.mark.parametrize(
    ("held", "slots", "expected"),
    [
        ([], 5, set()),
        ([250, 300, 348, 349], 3, set()),
        ([250, 300, 348, 349], 4, {300}),
        ([199, 201, 300, 348, 349], 5, {199, 300}),  # not later than the mark, and the newest of these
        ([201, 299, 348, 349], 5, {201, 299}),  # nothing is as old as the mark of 200: the oldest stands in
        ([340, 348, 349], 5, {340}),  # a job that has begun at 340
        ([100, 249, 348, 349], 6, {100, 249}),
    ],
)
def test_each_mark_keeps_the_newest_step_that_is_not_later(held: list[int], slots: int, expected: set[int]) -> None:
    assert kept(held, slots, 100) == expected


@given(st.sets(st.integers(0, 2000)), st.integers(0, 12), REACHES)
def test_no_more_steps_are_kept_than_there_are_slots_for(held: set[int], slots: int, reach: int) -> None:
    found = kept(held, slots, reach)
    assert found <= held
    assert len(found) <= max(slots - AT_WORK, 0)


class Rank:
    """A rank's slots, as headers."""

    def __init__(self, slots: int, reach: int) -> None:
        self.slots, self.reach = [Header()] * slots, reach
        self.locked: set[int] = set()
        """Slots that the drain process is reading."""

    def stage(self, step: int, *, durable: bool = False) -> bool:
        for index in overwrite_order(self.slots, self.reach):
            if index not in self.locked:
                self.slots[index] = Header(state=State.STAGED, generation=1, step=step, durable=durable, world=1)
                return True
        return False

    def seal(self, step: int) -> None:
        self._change(step, state=State.SEALED)

    def free(self, step: int) -> None:
        self._change(step, state=State.FREE)

    def drained(self) -> None:
        self.locked.clear()
        self.slots = [replace(each, drained=each.drained or each.durable) for each in self.slots]

    def _change(self, step: int, state: State) -> None:
        self.slots = [replace(each, state=state) if each.step == step and each.whole else each for each in self.slots]

    @property
    def held(self) -> set[int]:
        return {each.step for each in self.slots if each.state is State.SEALED}


@settings(deadline=None, max_examples=60)
@given(st.integers(3, 10), REACHES, st.integers(1, 120), st.integers(0, 1000))
def test_kept_ages_are_spread_by_octaves_at_any_stride(slots: int, reach: int, stride: int, first: int) -> None:
    rank = Rank(slots, reach)
    octaves = range(slots - AT_WORK - 1)
    shortest = -(-reach // 2 ** max(octaves, default=0))
    settled = first + 2 * (shortest << max(octaves, default=0)) + stride
    for step in range(first, settled + 4 * reach + 10 * stride, stride):
        assert rank.stage(step)
        assert rank.held >= {step - stride} - {first - stride}, "the newest sealed one"
        rank.seal(step)
        ages = [step - each for each in rank.held]
        if step < settled:
            continue
        for octave in octaves:
            youngest = shortest << octave
            assert any(youngest <= age < 2 * youngest + stride for age in ages), (octave, ages)
        if octaves:
            assert any(reach <= age for age in ages)
        assert len(ages) == min(slots, (step - first) // stride + 1)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 400), st.integers(1, 50), REACHES)
def test_three_slots_hold_the_last_three(count: int, stride: int, reach: int) -> None:
    rank = Rank(3, reach)
    for step in range(0, count * stride, stride):
        rank.stage(step)
        rank.seal(step)
        assert rank.held == {each for each in (step - 2 * stride, step - stride, step) if each >= 0}


@settings(deadline=None)
@given(st.integers(), st.integers(3, 8), REACHES)
def test_more_slots_never_skip_a_snapshot_that_three_slots_take(seed: int, slots: int, reach: int) -> None:
    """The newest that is to go to disk is held meanwhile, and read by the drain process, which takes its time."""
    rank, plain, chance = Rank(slots, reach), Rank(3, reach), random.Random(seed)
    for step in range(300):
        durable = chance.random() < 0.1
        taken = [each.stage(step, durable=durable) for each in (rank, plain)]
        assert taken[0] >= taken[1]
        sealed = chance.random() < 0.9
        for each in (rank, plain):
            each.seal(step) if sealed else each.free(step)
        waiting = [each.step for each in rank.slots if each.whole and each.durable and not each.drained]
        if waiting:
            if durable and sealed and taken[0]:
                assert max(waiting) == step, "not starved by what is older"
            for each in (rank, plain):
                each.locked = {index for index, slot in enumerate(each.slots) if slot.step == max(waiting)}
            if chance.random() < 0.3:
                rank.drained()
                plain.drained()


@settings(deadline=None, max_examples=60)
@given(st.integers(), st.integers(5, 8), st.integers(1, 60), st.integers(1, 7))
def test_ranks_that_lost_different_steps_later_keep_the_same_steps(
    seed: int, slots: int, reach: int, stride: int
) -> None:
    """One loses slots to readers, to damage, or overwrites what its peer has kept; both seal only what both have staged."""
    ranks, chance = [Rank(slots, reach) for _ in range(2)], random.Random(seed)
    longest = -(-reach // 2 ** (slots - AT_WORK - 2)) << (slots - AT_WORK - 2)
    trouble = 3 * longest + 10 * stride

    def go(step: int) -> None:
        taken = [rank.stage(step) for rank in ranks]
        for rank in ranks:
            rank.seal(step) if all(taken) else rank.free(step)
        both = [[*rank.slots] for rank in ranks]
        assert {stamp.step for stamp in complete(both, 2)} == set.intersection(*(rank.held for rank in ranks))

    for step in range(0, trouble, stride):
        go(step)
        for rank in ranks:
            rank.locked = set(chance.sample(range(slots), chance.randrange(3)))
            older = sorted(rank.held)[:-1]
            if older and chance.random() < 0.3:
                rank.free(chance.choice(older))
    for rank in ranks:
        rank.locked = set()
    for step in range(trouble - trouble % stride + stride, trouble + 3 * longest + 10 * stride, stride):
        go(step)
    assert ranks[0].held == ranks[1].held
    assert len(ranks[0].held) == slots


@given(st.integers(1, 500), st.integers(4, 9), REACHES)
def test_older_snapshots_remain_after_going_back(steps: int, slots: int, reach: int) -> None:
    rank = Rank(slots, reach)
    for step in range(steps):
        rank.stage(step)
        rank.seal(step)
    older = rank.held - {steps - 1}
    assume(older)
    back_to = max(older)
    rank.slots = [Header() if each.step > back_to else each for each in rank.slots]
    assert rank.held == older
    assert rank.stage(back_to + 1)
    assert back_to in rank.held
