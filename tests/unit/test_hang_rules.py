"""When a rank hangs: budgets, two looks, and who is to blame."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mt_resilient.resilience.detect.hang_blame import Answer, blame, explained, judge
from mt_resilient.resilience.detect.hang_rules import (
    HangPolicy,
    Look,
    Progress,
    Stage,
    budget_s,
    compare,
    device_state,
    overdue,
    patient,
    stage,
)
from mt_resilient.resilience.detect.stack_traces import Frame, Spot
from mt_resilient.resilience.errors import UsageError
from mt_resilient.resilience.model.collectives import GroupCalls
from mt_resilient.resilience.model.signals import DeviceState, Place
from mt_resilient.resilience.model.types import Doing, Rank, RankPhase

from .stalls import stall

POLICY = HangPolicy(
    factor=5,
    warmup_steps=5,
    floor_s=60,
    start_s=1000,
    evaluation_s=700,
    checkpoint_s=800,
    teardown_s=100,
    busy_s=900,
    idle_s=10,
)


def rank(silent_s: float = 0.0, phase: RankPhase = RankPhase.TRAINING, **fields: Any) -> Progress:
    """In its loop, after many steps of 2 s."""
    return Progress(
        **{"rank": Rank(0), "silent_s": silent_s, "phase": phase, "done": 100, "steps_s": [2.0] * 9, **fields}
    )


# -- the first signal ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("silent", "found", "allowed_s"),
    [
        (rank(), Stage.STEP, 60),
        (rank(steps_s=[]), Stage.STEP, 60),
        (rank(steps_s=[0.01] * 9), Stage.STEP, 60),
        (rank(steps_s=[20.0] * 9), Stage.STEP, 100),
        (rank(steps_s=[20.0, 20.0, 20.0, 900.0, 900.0]), Stage.STEP, 100),  # validation in two of them
        (rank(done=4), Stage.START, 1000),
        (rank(done=4, warmup_s=30.0), Stage.START, 150),
        (rank(done=4, warmup_s=1.0), Stage.START, 60),
        (rank(done=4, warmup_s=900.0), Stage.START, 1000),
        (rank(done=5, warmup_s=30.0), Stage.STEP, 60),
        (rank(turning=True), Stage.START, 1000),
        (rank(turning=True, warmup_s=30.0), Stage.START, 1000),
        (rank(doing=Doing.EVALUATION), Stage.EVALUATION, 700),
        (rank(doing=Doing.CHECKPOINT), Stage.CHECKPOINT, 800),
        (rank(doing=Doing.EVALUATION, done=0), Stage.EVALUATION, 700),
        (rank(phase=RankPhase.ABSENT), Stage.START, 1000),
        (rank(phase=RankPhase.ATTACHED), Stage.START, 1000),
        (rank(phase=RankPhase.ATTACHED, tells=False), None, float("inf")),
        (rank(phase=RankPhase.ABSENT, tells=False), None, float("inf")),
        (rank(phase=RankPhase.RESTORING), Stage.START, 1000),
        (rank(phase=RankPhase.RESTORING, warmup_s=30.0), Stage.START, 1000),
        (rank(phase=RankPhase.FINISHED), Stage.TAIL, 100),
        (rank(phase=RankPhase.STOPPED), Stage.TAIL, 100),
        (rank(doing=Doing.LEFT), Stage.TAIL, 100),
        (rank(doing=Doing.LEFT, done=4), Stage.TAIL, 100),
        (rank(phase=RankPhase.FINISHED, doing=Doing.EVALUATION), Stage.TAIL, 100),
    ],
)
def test_the_stage_and_the_budget_of_a_rank(silent: Progress, found: Stage | None, allowed_s: float) -> None:
    assert (stage(silent, POLICY), budget_s(silent, POLICY)) == (found, allowed_s)


@pytest.mark.parametrize(
    ("ranks", "answer"),
    [
        ([], False),
        ([rank(60)], False),
        ([rank(61)], True),
        ([rank(61), rank(61)], True),
        ([rank(61), rank(59)], False),
        ([rank(500), rank(500, doing=Doing.EVALUATION)], False),  # one evaluates alone, and the others wait for it
        ([rank(701), rank(701, doing=Doing.EVALUATION)], True),
        ([rank(9999, tells=False, phase=RankPhase.ATTACHED)], False),
        ([rank(101, phase=RankPhase.FINISHED)], True),
    ],
)
def test_all_have_to_be_silent_for_too_long(ranks: list[Progress], answer: bool) -> None:
    assert overdue(ranks, POLICY) is answer


@given(st.lists(st.floats(0.001, 1e4), max_size=64), st.floats(0, 1e4))
def test_a_step_is_never_overdue_before_the_floor(steps_s: list[float], silent_s: float) -> None:
    assert not overdue([rank(silent_s, steps_s=steps_s)], POLICY) or silent_s > POLICY.floor_s


# -- the second signal -----------------------------------------------------------------------------------------------------

HERE, THERE = Frame("/job/train.py", 31, "main"), Frame("/job/train.py", 32, "main")


def look(at_s: float = 0.0, place: Place = Place.ELSEWHERE, **fields: Any) -> Look:
    return Look(**{"at_s": at_s, "state": "S", "spot": Spot(place=place, words="here"), "stack": (HERE,), **fields})


def second(**fields: Any) -> Look:
    return look(10.0, **fields)


@pytest.mark.parametrize(
    ("first", "then", "unmoved_s", "moved", "busy"),
    [
        (look(), second(), 10, False, False),
        (look(), second(), 9, False, True),  # an upload, say
        (look(place=Place.DATA), second(place=Place.DATA), 9, False, True),
        (look(place=Place.COLLECTIVE), second(place=Place.COLLECTIVE), 9, False, False),
        (look(), second(stack=(THERE,)), 10, True, False),
        (look(), second(spot=Spot(place=Place.DATA, words="there")), 10, True, False),
        (look(), second(cpu_s=0.4), 10, False, False),
        (look(), second(cpu_s=0.6), 10, False, True),
        (look(), second(cpu_s=9.9), 899, False, True),
        (look(), second(cpu_s=9.9), 900, False, False),  # a wait for a device spins
        (look(), second(io_bytes=1 << 20), 10, False, False),
        (look(), second(io_bytes=2 << 20), 10, False, True),
        (look(), second(state="R"), 10, False, True),
        (look(state="R"), second(), 10, False, True),
        (look(), second(state="t"), 10, True, False),  # somebody debugs it
        (look(state="t"), second(), 10, True, False),  # or did
        (look(), second(state=""), 10, True, False),  # it has just ended
        # It does not answer, so it may work: its script has replaced the handler, or the kernel waits for storage.
        (look(place=Place.PERHAPS, stack=None), second(place=Place.PERHAPS, stack=None), 9, False, True),
        (look(place=Place.PERHAPS, stack=None), second(place=Place.PERHAPS, stack=None), 10, False, False),
        (look(place=Place.HALTED, stack=None), second(place=Place.HALTED, stack=None, state="D"), 9, False, True),
        (look(place=Place.HALTED, stack=None), second(place=Place.HALTED, stack=None), 9, False, False),  # not started
        (look(place=Place.HALTED), second(place=Place.HALTED, state="T", cpu_s=9.9), 10, False, False),
        (look(), second(place=Place.HALTED, state="T"), 10, True, False),  # stopped just now
        (look(place=Place.HALTED), second(place=Place.HALTED), 10, False, False),  # the launcher has not started it
        (look(place=Place.HALTED), second(place=Place.HALTED, cpu_s=5.0), 10, False, True),
        (look(place=Place.HALTED), second(place=Place.HALTED, state="D"), 10, False, False),
        (look(place=Place.HALTED), second(place=Place.HALTED, state="D", io_bytes=2 << 20), 10, False, True),
        (look(place=Place.BOUNDARY), second(place=Place.BOUNDARY, stack=(THERE,)), 10, False, False),  # it polls
        (look(place=Place.COLLECTIVE), second(place=Place.COLLECTIVE, stack=(THERE,)), 10, False, False),
        (look(place=Place.DATA), second(place=Place.DATA, stack=(THERE,)), 10, True, False),
    ],
)
def test_whether_a_rank_moved_or_was_busy_between_two_looks(
    first: Look, then: Look, unmoved_s: float, moved: bool, busy: bool
) -> None:
    assert compare(first, then, unmoved_s, POLICY)[:2] == (moved, busy)


HUNG = {"device_done": 7, "device_waits": True, "device_still_s": 69.0}
"""A device that has finished nothing for longer than the floor, which is 60 s."""


@pytest.mark.parametrize(
    ("first", "then", "moved", "busy"),
    [
        # A rank that polls a device which finishes nothing does not work, wherever in the model that is.
        (look(place=Place.PERHAPS, **HUNG), second(place=Place.PERHAPS, cpu_s=9.9, **HUNG), False, False),
        (look(place=Place.COLLECTIVE, **HUNG), second(place=Place.COLLECTIVE, cpu_s=9.9, **HUNG), False, False),
        (look(place=Place.BOUNDARY, **HUNG), second(place=Place.BOUNDARY, cpu_s=9.9, **HUNG), False, False),
        (look(place=Place.PERHAPS, **HUNG), second(place=Place.PERHAPS, state="R", **HUNG), False, False),
        (look(**HUNG), second(cpu_s=9.9, **HUNG), False, False),  # the queue of its device is full
        # It may still do something else.
        (look(place=Place.PERHAPS, **HUNG), second(place=Place.PERHAPS, io_bytes=2 << 20, **HUNG), False, True),
        (look(place=Place.DATA, **HUNG), second(place=Place.DATA, cpu_s=9.9, **HUNG), False, True),
        (look(**HUNG), second(**HUNG), False, True),  # an upload, as long as `idle_s` allows
        (look(**HUNG), second(cpu_s=9.9, stack=(THERE,), **HUNG), True, False),
        # The device finishes something, has nothing to do, or has waited for less than the floor; or nobody follows it.
        (
            look(place=Place.PERHAPS, **HUNG),
            second(place=Place.PERHAPS, cpu_s=9.9, **HUNG | {"device_done": 8}),
            False,
            True,
        ),
        (
            look(place=Place.PERHAPS, **HUNG),
            second(place=Place.PERHAPS, cpu_s=9.9, **HUNG | {"device_waits": False}),
            False,
            True,
        ),
        (
            look(place=Place.PERHAPS, **HUNG),
            second(place=Place.PERHAPS, cpu_s=9.9, **HUNG | {"device_still_s": 59.0}),
            False,
            True,
        ),
        (look(place=Place.PERHAPS), second(place=Place.PERHAPS, cpu_s=9.9), False, True),
        # The kernel waits for a device that is dead, not for storage.
        (
            look(place=Place.HALTED, stack=None, **HUNG | {"device_answers": False}),
            second(place=Place.HALTED, stack=None, state="D", **HUNG | {"device_answers": False}),
            False,
            False,
        ),
        # A device that finishes work is a sign of life, also if its rank sleeps meanwhile. An idle device is none.
        (look(place=Place.PERHAPS, **HUNG), second(place=Place.PERHAPS, **HUNG | {"device_done": 8}), False, True),
        (look(place=Place.PERHAPS, device_done=7), second(place=Place.PERHAPS, device_done=8), False, False),
    ],
)
def test_a_processor_that_polls_a_device_is_no_sign_of_life(first: Look, then: Look, moved: bool, busy: bool) -> None:
    assert compare(first, then, 5, POLICY)[:2] == (moved, busy)


def test_a_device_is_dead_if_it_does_not_even_do_work_that_waits_for_nothing() -> None:
    mute = HUNG | {"device_answers": False}
    assert device_state(look(**mute), second(**mute), POLICY) is DeviceState.DEAD
    assert device_state(look(**mute), second(**HUNG), POLICY) is DeviceState.STUCK
    assert device_state(look(**HUNG), second(**HUNG | {"device_done": 8}), POLICY) is DeviceState.UNKNOWN


def test_a_place_where_a_device_was_still_before_may_be_still_for_longer() -> None:
    hung = look(**HUNG), second(**HUNG)
    assert device_state(*hung, patient(POLICY, 13)) is DeviceState.STUCK  # five times that is 65 s
    assert device_state(*hung, patient(POLICY, 14)) is DeviceState.UNKNOWN
    assert patient(POLICY, 1000).floor_s == POLICY.busy_s, "not for longer than without a look at the device"


# -- who it is -------------------------------------------------------------------------------------------------------------

COLLECTIVE, EXCHANGE, BOUNDARY = Place.COLLECTIVE, Place.EXCHANGE, Place.BOUNDARY
ELSEWHERE, DATA, HALTED, PERHAPS = Place.ELSEWHERE, Place.DATA, Place.HALTED, Place.PERHAPS


@pytest.mark.parametrize(
    ("places", "blamed"),
    [
        ([COLLECTIVE, ELSEWHERE], [1]),
        ([DATA, COLLECTIVE], [0]),
        ([COLLECTIVE, HALTED, COLLECTIVE], [1]),
        ([ELSEWHERE, HALTED], [1]),
        ([PERHAPS, ELSEWHERE], [1]),
        ([PERHAPS, COLLECTIVE], []),
        ([PERHAPS, PERHAPS], []),
        ([COLLECTIVE, COLLECTIVE], []),
        ([BOUNDARY, ELSEWHERE, DATA], [1, 2]),
        ([ELSEWHERE, ELSEWHERE], [0, 1]),
        ([EXCHANGE, EXCHANGE, EXCHANGE], []),
    ],
)
def test_the_rank_that_did_not_enter_the_collective_is_blamed(places: list[Place], blamed: list[int]) -> None:
    assert [s.rank for s in blame([stall(n, place) for n, place in enumerate(places)])] == blamed


def test_the_rank_at_the_lowest_step_is_blamed_wherever_it_waits() -> None:
    assert [s.rank for s in blame([stall(0, BOUNDARY, step=11), stall(1, COLLECTIVE, step=10)])] == [1]
    assert [s.rank for s in blame([stall(0, ELSEWHERE, step=11), stall(1, PERHAPS, step=10)])] == [1]
    three = [stall(0, BOUNDARY, step=11), stall(1, COLLECTIVE, step=10), stall(2, DATA, step=10)]
    assert [s.rank for s in blame(three)] == [2]


def test_the_rank_in_another_collective_than_most_is_blamed() -> None:
    most = [stall(n, COLLECTIVE, site="train.py line 31") for n in range(3)]
    other = stall(3, COLLECTIVE, site="train.py line 40")
    assert blame([*most, other]) == (other,)
    assert blame([most[0], other]) == ()
    assert blame([*most, replace(other, place=EXCHANGE)]) == ()


def called(number: int, *, open_: bool = False, call: str = "all_reduce") -> tuple[GroupCalls, ...]:
    return (
        GroupCalls(group="0", about="default_pg", last=number, open=number if open_ else 0, call=call if open_ else ""),
    )


def test_the_flight_recorders_and_the_devices_show_whom_stacks_do_not_show() -> None:
    stuck, dead = DeviceState.STUCK, DeviceState.DEAD
    waits = stall(0, PERHAPS, device=stuck, calls=called(41, open_=True))
    missing = stall(1, PERHAPS, device=stuck, calls=called(40))
    assert blame([waits, missing]) == (missing,)
    assert "flight recorder shows that rank 1 has not called collective 41" in explained([waits, missing])
    other = stall(2, PERHAPS, device=stuck, calls=called(41, open_=True, call="all_gather"))
    assert blame([waits, replace(waits, rank=Rank(1)), other]) == (other,)
    assert blame([waits, other]) == ()
    assert "the ranks differ at collective 41" in judge([waits, other]).reason
    gone = stall(1, PERHAPS, device=dead, calls=called(41, open_=True))
    assert blame([waits, gone]) == (gone,)
    assert "rank 1: its device finished nothing" in explained([waits, gone])
    alone = stall(1, ELSEWHERE, device=stuck)
    assert blame([stall(0, COLLECTIVE), alone]) == (alone,)
    assert blame([stall(0, COLLECTIVE, device=stuck), stall(1, PERHAPS)]) == ()
    launching = stall(0, ELSEWHERE, device=stuck)  # it would put a kernel into a full queue
    assert blame([launching, stall(1, DATA)]) == (stall(1, DATA),)


def test_a_rank_that_waits_in_a_receive_is_not_blamed_for_the_collective_that_it_has_not_called() -> None:
    waits, receives = stall(0, COLLECTIVE, calls=called(41, open_=True)), stall(1, Place.EXCHANGE, calls=called(40))
    assert blame([waits, receives]) == ()
    assert "rank 1 has not called collective 41" in judge([waits, receives]).reason
    hangs = stall(2, ELSEWHERE, calls=called(40))
    assert blame([waits, receives, hangs]) == (hangs,)


def test_a_recorder_accuses_nobody_while_a_further_rank_works() -> None:
    waits, missing = stall(0, PERHAPS, calls=called(41, open_=True)), stall(1, PERHAPS, calls=called(40))
    works = stall(2, ELSEWHERE, busy=True)
    assert blame([waits, missing, works]) == (works,)
    assert judge([waits, missing, works]).answer is Answer.SUSPECTED
    assert judge([waits, replace(missing, busy=True)]).answer is Answer.SUSPECTED


def test_a_dead_device_accuses_nobody_while_a_further_rank_works() -> None:
    """Rank 0 saves for long, and the devices of the others wait for it. What they wait in may hold up every stream."""
    dead = [stall(n, PERHAPS, device=DeviceState.DEAD) for n in (1, 2, 3)]
    for place in (ELSEWHERE, PERHAPS):  # it writes, or its device finishes work
        assert judge([stall(0, place, busy=True), *dead]).answer is Answer.SUSPECTED
    assert judge([stall(0, ELSEWHERE), *dead]).answer is Answer.CERTAIN
    waits, missing = replace(dead[0], calls=called(41, open_=True)), stall(0, PERHAPS, calls=called(40))
    assert blame([waits, missing]) == (missing,), "a recorder is surer than a device that waits"


@pytest.mark.parametrize(
    ("stalls", "answer"),
    [
        ([], Answer.NO),
        ([stall(0)], Answer.CERTAIN),
        ([stall(0, moved=True)], Answer.SUSPECTED),
        ([stall(0, busy=True)], Answer.SUSPECTED),
        ([stall(0, COLLECTIVE, busy=True), stall(1)], Answer.CERTAIN),  # who waits may spin
        ([stall(0, COLLECTIVE, moved=True), stall(1)], Answer.SUSPECTED),  # but if it moves, something goes on
        ([stall(0, COLLECTIVE), stall(1, busy=True)], Answer.SUSPECTED),
        ([stall(0, COLLECTIVE, busy=True), stall(1, COLLECTIVE)], Answer.SUSPECTED),
        ([stall(0, COLLECTIVE), stall(1, COLLECTIVE)], Answer.CERTAIN),
    ],
)
def test_a_hang_is_denied_suspected_or_certain(stalls: list, answer: Answer) -> None:
    judgement = judge(stalls)
    assert judgement.answer is answer
    assert bool(judgement.reason) is bool(stalls)


@given(
    st.lists(st.builds(stall, st.integers(0, 9), st.sampled_from(Place), st.integers(9, 11)), min_size=1, max_size=6)
)
def test_the_blamed_are_some_of_those_furthest_behind(stalls: list) -> None:
    blamed = blame(stalls)
    assert set(blamed) <= set(stalls)
    assert {s.step for s in blamed} <= {min(s.step for s in stalls)}


# -- the policy ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [("factor", 1.0), ("warmup_steps", 0), ("floor_s", 0.0), ("start_s", -1.0), ("busy_s", 0.0), ("idle_s", 0.0)],
)
def test_impossible_values_of_the_policy_are_refused(field: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"hang.{field} is"):
        HangPolicy(**{field: value})
