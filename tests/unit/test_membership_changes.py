"""One node that is gone is one story: felt, missed, waited for, back."""

from dataclasses import replace

import pytest

from mt_resilient.resilience.decide.decide import decide
from mt_resilient.resilience.decide.policy import Policy
from mt_resilient.resilience.incidents.membership_changes import missed_told
from mt_resilient.resilience.model.cluster_state import World
from mt_resilient.resilience.model.generation import Decision
from mt_resilient.resilience.model.node import AckKind, Spec
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import NodeId

from .worlds import NOW, A, B, ack, incident, node, record, status, world

TWO = Spec(command=("torchrun",), sizes=(2,))
FELT = incident(1, 1)
"""A rank of `a` has raised; then `b` was seen to be gone."""


def waiting(**changes: object) -> World:
    """A generation of `a` and `b` gathers, and `b` is not there."""
    healthy: dict = {
        "spec": TWO,
        "record": record(Phase.GATHER, 2, ("a", "b")),
        "nodes": {A: node("a")},
        "status": {A: status(1, max_step=10)},
        "acks": {A: ack(AckKind.READY, 2)},
        "incidents": (FELT,),
    }
    return world(**{**healthy, **changes})


def test_what_was_felt_first_becomes_the_story_of_the_node_that_is_missed() -> None:
    decision = decide(waiting(), NOW, Policy())
    assert decision.record is None
    (told,) = decision.incidents
    assert (told.id, told.cause, told.nodes, told.open) == ("0001", "agent_lost", ("b",), True)
    assert told.evidence[:2] == (
        "the agent of b is gone: its lease expired",
        f"seen before, as a consequence: {FELT.summary}",
    )
    assert told.plan.endswith("; the job waits for b")
    assert decide(waiting(incidents=(told,)), NOW, Policy()) == Decision()


@pytest.mark.parametrize("cause", ["ordered", "moved"])
def test_what_nobody_had_to_do_stays_what_it_was(cause: str) -> None:
    assert missed_told(waiting(incidents=(replace(FELT, cause=cause),)), (B,)) == ()


def test_a_second_node_that_is_missed_joins_the_first() -> None:
    (told,) = missed_told(waiting(), (B,))
    (both,) = missed_told(waiting(incidents=(told,)), (B, NodeId("c")))
    assert both.nodes == ("b", "c")
    assert both.summary == told.summary
    assert both.evidence[-1] == "the agent of c is gone: its lease expired"


def test_it_comes_back_and_the_story_goes_on() -> None:
    (told,) = missed_told(waiting(), (B,))
    back = waiting(nodes={A: node("a"), B: node("b", "anew")}, incidents=(told,))
    decision = decide(back, NOW, Policy())
    assert decision.record
    assert (decision.record.number, decision.record.members) == (3, {"a": "agent-a", "b": "anew"})
    assert decision.record.reason == "b is back"
    (later,) = decision.incidents
    assert (later.id, later.open, later.rung) == ("0001", True, 2)
    assert later.plan.endswith("; the job waits for b; b is back")


def test_one_that_nobody_has_missed_is_a_fault_of_its_own() -> None:
    """Its agent died and was started again before its lease was over."""
    back = waiting(nodes={A: node("a"), B: node("b", "anew")})
    assert [i.cause for i in decide(back, NOW, Policy()).incidents] == ["agent_restarted"]
