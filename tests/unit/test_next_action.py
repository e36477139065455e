"""Orders + own state → the next local action: every state there is, looked up in a table of a dozen rows."""

from dataclasses import replace
from itertools import product

import pytest

from mt_resilient.agent.loop.next_action import Action, LocalState, duty
from mt_resilient.resilience.model.generation import GenerationRecord, RewindOrder
from mt_resilient.resilience.model.node import AckKind
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import Step

from .worlds import A, record

ME = "agent-a"
NUMBER = 5
BOTH = (True, False)

PLACES: dict[str, GenerationRecord | None] = {
    "no record": None,
    "ended without me": record(Phase.ENDED, NUMBER, members=("b",)),
    **{f"{phase} without me": record(phase, NUMBER, members=("b",)) for phase in Phase if phase is not Phase.ENDED},
    **{str(phase): record(phase, NUMBER) for phase in Phase},
    "ending with a snapshot": record(Phase.ENDING, NUMBER, last_snapshot=True),
    "ending by a signal": record(Phase.ENDING, NUMBER, exit_code=130),
    "preempted": record(Phase.ENDING, NUMBER, exit_code=143, last_snapshot=True),
}

ENDING = {"ending", "ending with a snapshot", "ending by a signal", "preempted"}
WITHOUT_ME = {place for place in PLACES if place.endswith("without me")} - {"ended without me"}

TABLE: list[tuple[set[str], dict[str, object], Action]] = [
    # A record that is not about this agent is none of its business, until the job is over.
    ({"no record"}, {}, Action.WAIT),
    ({"ended"}, {}, Action.LEAVE),
    ({"ended without me"}, {"group": {0}}, Action.LEAVE),
    ({"ended without me"}, {}, Action.STAND_DOWN),
    # … but ranks of a generation that is past would train beside those of the present one.
    (WITHOUT_ME, {"group": {NUMBER - 1}}, Action.STAND_DOWN),
    (WITHOUT_ME, {}, Action.WAIT),
    # Gathering is over when nothing is left here and that was said of this very generation.
    ({"gather"}, {"group": {0}, "acked": {(NUMBER, AckKind.READY)}}, Action.WAIT),
    ({"gather"}, {}, Action.CLEAR),
    # A worker group of this generation is to be here, and is started once: one that is over is the controller's to judge.
    ({"launch", "run"}, {"group": {0, NUMBER - 1}}, Action.LAUNCH),
    ({"launch", "run"}, {"attached": {False}}, Action.WAIT),
    ({"launch", "run"}, {"acked": {(NUMBER, AckKind.RUNNING)}}, Action.WAIT),
    ({"launch", "run"}, {}, Action.SAY_RUNNING),
    # Ranks that can take a last snapshot get the time for it.
    (ENDING, {"acked": {(NUMBER, AckKind.ENDED)}}, Action.WAIT),
    (ENDING, {"group": {0}}, Action.END_GROUP),
    (ENDING, {"group_over": {True}}, Action.END_GROUP),
    (ENDING, {"grace_over": {True}}, Action.END_GROUP),
    (ENDING, {"leave_ordered": {True}}, Action.WAIT),
    ({"ending with a snapshot", "preempted"}, {"training": {True}}, Action.ORDER_LEAVE),
    # The signal that torchrun would pass on: ranks run their handlers, and save by themselves where nothing else saves.
    ({"ending by a signal", "preempted"}, {"attached": {True}}, Action.PASS_SIGNAL),
    (ENDING, {}, Action.END_GROUP),
]
"""Where the record stands, what must hold of this node, and the answer; the first row that fits counts."""

STATES = [
    LocalState(
        instance=ME,
        group=group,
        group_over=over,
        attached=attached,
        training=training,
        acked=acked,
        rewind=0,
        paused=False,
        waiting=False,
        snapshot="",
        leave_ordered=ordered,
        grace_over=grace,
    )
    for group, over, attached, training, acked, ordered, grace in product(
        (0, NUMBER - 1, NUMBER),
        BOTH,
        BOTH,
        BOTH,
        [(0, None), *((number, kind) for number in (NUMBER - 1, NUMBER) for kind in AckKind)],
        BOTH,
        BOTH,
    )
]


def row_of(place: str, me: LocalState) -> int:
    fits = (
        number
        for number, (places, conditions, _) in enumerate(TABLE)
        if place in places and all(getattr(me, name) in values for name, values in conditions.items())  # type: ignore[operator]
    )
    return next(fits)


@pytest.mark.parametrize("place", PLACES)
def test_truth_table(place: str) -> None:
    for me in STATES:
        assert duty(PLACES[place], me) is TABLE[row_of(place, me)][2], me


def test_each_row_of_the_table_counts() -> None:
    assert {row_of(place, me) for place in PLACES for me in STATES} == set(range(len(TABLE)))


def test_an_earlier_life_of_this_agent_is_not_this_agent() -> None:
    me = STATES[0]
    before = replace(record(Phase.GATHER, NUMBER), members={A: "agent-a-before"})
    assert duty(before, me) is Action.WAIT


BACK = RewindOrder(number=7, to=Step(40))
RUNNING = next(
    me
    for me in STATES
    if (me.group, me.attached, me.training, me.acked) == (NUMBER, True, True, (NUMBER, AckKind.RUNNING))
)


@pytest.mark.parametrize("phase", [Phase.LAUNCH, Phase.RUN])
@pytest.mark.parametrize(
    ("ordered", "known", "action"),
    [
        ({"rewind": BACK}, {}, Action.ORDER_REWIND),
        ({"rewind": BACK}, {"rewind": 6}, Action.ORDER_REWIND),
        ({"rewind": BACK}, {"rewind": 7}, Action.WAIT),
        ({"rewind": replace(BACK, left="of another lineage")}, {}, Action.WAIT),
        ({"begins": BACK}, {}, Action.WAIT),
        ({"paused": True}, {}, Action.ORDER_PAUSE),
        ({"paused": True}, {"paused": True}, Action.WAIT),
        ({}, {"paused": True}, Action.ORDER_PAUSE),
        ({"snapshot": "b"}, {"snapshot": "a"}, Action.ORDER_SNAPSHOT),
        ({"snapshot": "b"}, {"snapshot": "b"}, Action.WAIT),
        ({"snapshot": "b"}, {"training": False}, Action.WAIT),
        ({"moving": "n2 joins"}, {}, Action.ORDER_PAUSE),
        ({"moving": "n2 joins"}, {"paused": True}, Action.WAIT),
        ({"moving": "n2 joins"}, {"paused": True, "waiting": True}, Action.ORDER_SNAPSHOT),
        ({"rewind": BACK, "paused": True, "snapshot": "b"}, {}, Action.ORDER_REWIND),
        ({"rewind": BACK, "paused": True}, {"group": 0}, Action.LAUNCH),
        ({"rewind": BACK, "paused": True}, {"acked": (0, None)}, Action.SAY_RUNNING),
    ],
)
def test_the_ranks_are_told_once_what_is_ordered(phase: Phase, ordered: dict, known: dict, action: Action) -> None:
    assert duty(record(phase, NUMBER, **ordered), replace(RUNNING, **known)) is action
