"""Replicas that have gone apart while all ranks live: they are sent back in place, and started again where that does not happen."""

from dataclasses import replace
from typing import Any

import pytest

from mt_resilient.resilience.decide.decide import decide
from mt_resilient.resilience.decide.policy import Policy
from mt_resilient.resilience.model.cluster_state import World
from mt_resilient.resilience.model.generation import Decision, RewindOrder
from mt_resilient.resilience.model.request import Request, Wish
from mt_resilient.resilience.model.signals import InPlaceRewind
from mt_resilient.resilience.model.types import Generation, OrderedBy, Step
from mt_resilient.resilience.plan.escalation import RecoveryPolicy

from .worlds import NOW, A, gone, mismatch, record, status, world

SAID: dict[str, Any] = {
    "memory_steps": (7, 9),
    "durable_steps": (5,),
    "agreed_steps": (5, 7),
    "max_step": 10,
    "min_step": 10,
    "stepped_s": NOW - 50,
    "mismatches": (mismatch(),),
}
PATIENCE_S = RecoveryPolicy().in_place_s


def there(**said: Any) -> World:
    return world(status={A: status(**{**SAID, **said})})


def decided(judged: World, later_s: float = 0.0) -> Decision:
    return decide(judged, NOW + later_s, Policy())


def after(judged: World, **said: Any) -> World:
    """The ranks have been told, and say this."""
    decision = decided(judged)
    assert decision.record
    known = replace(judged.status[A], **said)
    return replace(judged.with_incidents(decision.incidents), record=decision.record, status={A: known})


def test_ranks_that_live_are_sent_back_in_place() -> None:
    decision = decided(there())
    assert decision.record == replace(record(), rewind=RewindOrder(number=1, to=Step(7), cause=OrderedBy.COMPARISON)), (
        "not to 9, which did not agree"
    )
    (incident,) = decision.incidents
    assert (incident.cause, incident.rung, incident.onset) == ("fingerprint_mismatch", 1, 8)
    assert decided(after(there())) == Decision()


def test_what_they_say_closes_it_and_the_same_again_is_another_one() -> None:
    told = InPlaceRewind(
        ordinal=1,
        generation=Generation(1),
        cause="fingerprint_mismatch",
        onset=Step(8),
        to=Step(5),
        reached=Step(12),
        remedy="replay",
        order=1,
        at_s=NOW,
        restore_s=0.1,
    )
    done = after(there(), rewinds=(told,))
    (over,) = decided(done).incidents
    assert (over.open, over.rung, over.resume_step, over.lost_steps) == (False, 1, 5, 7)
    closed = done.with_incidents((over,))
    assert decided(closed) == Decision()
    again = replace(closed, status={A: replace(closed.status[A], mismatches=(mismatch(), mismatch(at_s=NOW)))})
    second = decided(again).record
    assert second
    assert second.rewind
    assert second.rewind.number == 2


@pytest.mark.parametrize(
    ("said", "later_s", "reopens"),
    [
        ({}, PATIENCE_S - 2, False),
        ({}, PATIENCE_S, True),
        ({"declined": 1}, 0.0, True),
        ({"finished": True}, 0.0, True),
        ({"exits": (gone(started=True),)}, 0.0, True),
    ],
)
def test_ranks_that_do_not_or_cannot_are_started_again(said: dict[str, Any], later_s: float, reopens: bool) -> None:
    decision = decided(after(there(), **said), later_s)
    if not reopens:
        assert decision == Decision()
        return
    assert decision.record
    assert (decision.record.number, decision.record.rewind) == (2, None)
    story = next(i for i in decision.incidents if i.cause == "fingerprint_mismatch")
    assert (story.rung, story.onset, story.open) == (2, 8, True), "its onset bounds where the next ones begin"


@pytest.mark.parametrize(
    "said",
    [
        {"stepped_s": 0.0},
        {"agreed_steps": (), "memory_steps": (9,), "durable_steps": ()},
        {"exits": (gone(started=True),)},
    ],
)
def test_where_they_cannot_be_asked_the_worker_group_is_started_again(said: dict[str, Any]) -> None:
    reopened = decided(there(**said)).record
    assert reopened
    assert reopened.number == 2


def test_who_wants_to_leave_leaves() -> None:
    stop = Request(kind=Wish.STOP, id="1", exit_code=130)
    leaving = decided(replace(after(there()), requests=(stop,)), PATIENCE_S).record
    assert leaving
    assert leaving.exit_code == 130
