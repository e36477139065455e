"""Orders, own state and what was begun → actions in order: launches that wait, leaving within a deadline, the end and its last snapshot."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mt_resilient.agent.loop.next_action import LONG_S, Action, Begun, LocalState, Patience, step
from mt_resilient.resilience.decide.planned_move import SAVE_S
from mt_resilient.resilience.model.generation import GenerationRecord, Source
from mt_resilient.resilience.model.node import AckKind
from mt_resilient.resilience.model.state_machine import Phase

from .worlds import A, B, record

NUMBER = 5
PATIENCE = Patience(warm_s=30.0, leave_s=60.0)
ME = LocalState(
    instance="agent-a",
    group=0,
    group_over=False,
    attached=False,
    training=False,
    acked=(0, None),
    rewind=0,
    paused=False,
    waiting=False,
    snapshot="",
)
THERE = replace(ME, group=NUMBER, attached=True, training=True, acked=(NUMBER, AckKind.RUNNING))
AT_WORK = replace(ME, written=False)
"""Its ranks are gone, and the drain process still writes."""
END = (Action.END_GROUP, Action.LET_GO, Action.FINISH_WRITING)


def play(
    order: GenerationRecord, *looks: tuple[float, LocalState], begun: Begun | None = None
) -> list[tuple[Action, ...]]:
    """What is done at each look, at such a time with such a state."""
    told, now = [], begun or Begun()
    for now_s, me in looks:
        now, actions = step(order, me, now, now_s, PATIENCE)
        told.append(actions)
    return told


LAUNCH = record(Phase.LAUNCH, NUMBER)
IMPORTING = replace(ME, importing=True)


def test_a_start_waits_for_the_warm_process_and_not_for_ever() -> None:
    looks = [(100.0, IMPORTING), (129.0, IMPORTING), (130.0, IMPORTING)]
    assert play(LAUNCH, *looks) == [(), (), (Action.START_COLD, Action.LAUNCH)]
    assert play(LAUNCH, (100.0, IMPORTING), (101.0, ME)) == [(), (Action.LAUNCH,)]


def test_each_start_waits_anew() -> None:
    begun, _ = step(LAUNCH, IMPORTING, Begun(), 100.0, PATIENCE)
    assert step(record(Phase.LAUNCH, NUMBER + 1), IMPORTING, begun, 200.0, PATIENCE)[1] == ()


def test_what_a_node_lacks_is_asked_for_once_before_its_ranks_start() -> None:
    order = record(Phase.LAUNCH, NUMBER, members=("a", "b"), sources={A: Source(holder=B, generation=1, rewinds=0)})
    assert play(order, (1.0, IMPORTING), (2.0, IMPORTING), (3.0, ME)) == [(Action.FETCH,), (), (Action.LAUNCH,)]
    other = replace(ME, instance="agent-b")
    assert play(order, (1.0, other)) == [(Action.LAUNCH,)]


@pytest.mark.parametrize(
    ("order", "over_s"),
    [
        (record(Phase.ENDING, NUMBER, last_snapshot=True), 60.0),
        (record(Phase.ENDING, NUMBER, last_snapshot=True, leave_in_s=20.0), 10.0),  # the half: the rest is the disk's
        (record(Phase.ENDING, NUMBER, exit_code=130), 60.0),
        (record(Phase.ENDING, NUMBER, exit_code=130, leave_in_s=20.0), 20.0),
    ],
)
def test_ranks_that_are_told_to_leave_get_their_time(order: GenerationRecord, over_s: float) -> None:
    told = Action.ORDER_LEAVE if order.last_snapshot else Action.PASS_SIGNAL
    at_s = 100.0
    looks = [(at_s, THERE), (at_s + over_s, THERE), (at_s + over_s + 0.1, THERE)]
    assert play(order, *looks) == [(told,), (), END]


def test_a_deadline_counts_from_when_it_was_heard_first() -> None:
    order = record(Phase.ENDING, NUMBER, last_snapshot=True, leave_in_s=20.0)
    starting = replace(THERE, training=False, attached=False)
    # No rank hears an order yet: the generation is ended at once, and what is left of the time is the disk's.
    looks = [(100.0, starting), (119.0, AT_WORK), (120.1, AT_WORK)]
    assert play(order, *looks) == [END, (Action.TELL_WAITING,), (Action.GIVE_UP_WRITING,)]


DONE = record(Phase.ENDING, NUMBER, complete=True)


def test_the_end_of_a_training_waits_for_its_disk_and_says_so_once() -> None:
    looks = [(0.5, AT_WORK), (1.0, AT_WORK), (LONG_S + 1.0, AT_WORK), (9e3, AT_WORK), (9e3, ME)]
    assert play(DONE, *looks) == [END, (), (Action.TELL_WAITING,), (), (Action.SAY_ENDED,)]


@pytest.mark.parametrize(
    ("order", "hurry", "grace_s"),
    [
        (DONE, True, 60.0),
        (record(Phase.ENDING, NUMBER, exit_code=5), False, 60.0),
        (record(Phase.ENDING, NUMBER, last_snapshot=True), False, SAVE_S),
    ],
)
def test_who_is_in_a_hurry_leaves_without_what_is_not_on_disk(
    order: GenerationRecord, hurry: bool, grace_s: float
) -> None:
    me = replace(AT_WORK, hurry=hurry)
    begun = Begun(finishing_s=10.0, told=True)
    assert play(order, (10.0 + grace_s, me), (10.1 + grace_s, me), begun=begun) == [(), (Action.GIVE_UP_WRITING,)]


def test_what_turns_out_wrong_while_the_job_ends_is_let_go() -> None:
    begun, actions = step(DONE, AT_WORK, Begun(), 1.0, PATIENCE)
    assert actions == END
    wrong = replace(DONE, onset=7)
    begun, actions = step(wrong, AT_WORK, begun, 2.0, PATIENCE)
    assert actions == (Action.LET_GO,)
    assert step(wrong, AT_WORK, begun, 3.0, PATIENCE)[1] == ()


def test_a_job_that_was_ending_and_goes_on_begins_again_in_all() -> None:
    order = record(Phase.ENDING, NUMBER, last_snapshot=True, leave_in_s=20.0)
    begun, _ = step(order, THERE, Begun(), 100.0, PATIENCE)
    begun, actions = step(order, replace(THERE, group_over=True), begun, 101.0, PATIENCE)
    assert actions == END
    begun, actions = step(record(Phase.GATHER, NUMBER + 1), ME, begun, 102.0, PATIENCE)
    assert actions == (Action.WRITE_AGAIN, Action.CLEAR, Action.SAY_READY)
    assert begun == Begun()
    # Told to leave a second time, ranks get their time anew.
    again = record(Phase.ENDING, NUMBER + 1, last_snapshot=True)
    there = replace(THERE, group=NUMBER + 1)
    assert play(again, (500.0, there), (560.0, there), begun=begun) == [(Action.ORDER_LEAVE,), ()]
