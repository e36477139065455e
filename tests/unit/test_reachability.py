"""Who is dead, and who only does not reach etcd: a truth table."""

from dataclasses import replace
from typing import Any

import pytest

from mt_resilient.resilience.decide.decide import decide
from mt_resilient.resilience.decide.policy import Policy
from mt_resilient.resilience.membership.reachability import cut_off
from mt_resilient.resilience.model.cluster_state import World
from mt_resilient.resilience.model.generation import Decision
from mt_resilient.resilience.model.node import AckKind, Death, Spec
from mt_resilient.resilience.model.request import Request, Wish
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import NodeId

from .worlds import NOW, A, B, ack, gone, node, record, status, world

LEASE_S = 10.0


def said(silent_s: float = 0.5, ago_s: float = 1.0, stride_s: float = 1.0, **fields: Any) -> Any:
    """The word of `a`, so long ago; its ranks had finished their last step so long before it."""
    at_s = NOW - ago_s
    told = status(max_step=10, stepped_s=1.0, pulse_s=at_s - silent_s, stride_s=stride_s, often_s=2.0)
    return replace(told, at_s=at_s, **fields)


def missing(a: Any, heard_s: float = 9.0, **changes: Any) -> World:
    """`b` has no lease; its last word is so long ago. A spare could take its place."""
    last = replace(status(max_step=5, stepped_s=1.0, often_s=2.0), at_s=NOW - heard_s)
    healthy: dict[str, Any] = {
        "spec": Spec(command=("torchrun",), sizes=(2,), spares=1),
        "record": record(members=("a", "b")),
        "nodes": {A: node("a"), NodeId("c"): node("c")},
        "status": {A: a, B: last},
        "acks": {A: ack(AckKind.RUNNING), B: ack(AckKind.RUNNING, name="b")},
    }
    return world(**{**healthy, **changes})


@pytest.mark.parametrize(
    ("there", "trains"),
    [
        # quick steps: the newest is younger than half a lease
        (missing(said()), True),
        (missing(said(silent_s=3.9)), True),
        # it died, and its lease was over as soon as can be: two thirds of a lease later
        (missing(said(silent_s=6.7, ago_s=0.0), heard_s=7.0), False),
        (missing(said(silent_s=5.7, ago_s=1.0), heard_s=8.5), False),
        # slow steps: the newest was finished long after the node's last word, and the next one is not overdue
        (missing(said(silent_s=5.5, ago_s=0.5, stride_s=6.0), heard_s=12.0), True),
        (missing(said(silent_s=17.0, ago_s=0.5, stride_s=6.0), heard_s=30.0), True),
        (missing(said(silent_s=18.5, ago_s=0.5, stride_s=6.0), heard_s=30.0), False),
        # slow steps, and none was finished since: it may be dead
        (missing(said(silent_s=7.0, ago_s=0.5, stride_s=6.0), heard_s=9.0), False),
        # it was cut off, and then it died
        (missing(said(silent_s=4.5, ago_s=0.6, stride_s=0.2), heard_s=60.0), False),
        # how often it speaks is not known
        (missing(said(silent_s=5.5, stride_s=6.0, often_s=0.0), heard_s=12.0), True),
        (missing(said(), status={A: said()}), True),
        (missing(said(silent_s=5.5, stride_s=6.0), status={A: said(silent_s=5.5, stride_s=6.0)}), False),
        # somebody's ranks have ended, or are silent
        (missing(said(exits=(gone(),))), False),
        (missing(said(finished=True)), False),
        (missing(said(stopped=True)), False),
        # no step was finished in this generation
        (missing(said(pulse_s=0.0)), False),
        (missing(said(generation=0)), False),
        (missing(said(), status={}), False),
        # its host says that it is dead; it was started anew
        (missing(said(), dead={"agent-b": Death(at_s=NOW)}), False),
        (missing(said(), nodes={A: node("a"), B: node("b", "anew")}), False),
        # nobody trains yet
        *(
            (missing(said(), record=record(phase, members=("a", "b"))), False)
            for phase in Phase
            if phase is not Phase.RUN
        ),
    ],
)
def test_a_node_without_a_lease_trains_if_steps_show_it(there: World, trains: bool) -> None:
    assert cut_off(there, NOW, LEASE_S) == ((B,) if trains else ())


@pytest.mark.parametrize(
    ("spares", "changes", "wait"),
    [
        (1, {}, True),
        (2, {}, False),  # they may begin, and the members know it
        (1, {"dead": {"agent-a": Death(at_s=NOW)}}, False),
        (1, {"nodes": {A: node("a", "anew"), NodeId("c"): node("c")}}, False),
    ],
)
def test_where_nobody_is_left_to_say_so_those_count_without_whom_nobody_begins(
    spares: int, changes: dict[str, Any], wait: bool
) -> None:
    alone = missing(said(), nodes={NodeId("c"): node("c")}, spec=Spec(command=("torchrun",), sizes=(2,), spares=spares))
    found = decide(replace(alone, **changes), NOW, POLICY)
    assert (found.record is None) == wait
    assert [each.nodes for each in found.incidents if each.cause == "cut_off"] == ([("a",), ("b",)] if wait else [])


@pytest.mark.parametrize(
    ("heard_s", "spares", "changes", "wait"),
    [
        (5.1, 1, {}, True),
        (4.9, 1, {}, False),
        (5.1, 2, {}, False),  # others may begin
        (5.1, 1, {"dead": {"agent-b": Death(at_s=NOW)}}, False),
        (5.1, 1, {"nodes": {A: node("a"), B: node("b", "anew")}}, False),
        (-5.1, 1, {}, False),  # the clock of who leads was set back
    ],
)
def test_of_several_that_fall_silent_the_first_is_not_replaced(
    heard_s: float, spares: int, changes: dict[str, Any], wait: bool
) -> None:
    """The lease of `b` is over, that of `a` may be next. Nobody's steps show anything."""
    last = said(silent_s=6.0, ago_s=6.0)
    alone = missing(last, spec=Spec(command=("torchrun",), sizes=(2,), spares=spares), heard_s=6.0)
    found = decide(replace(alone, heard_s={A: NOW - heard_s, B: NOW - 6.0}, **changes), NOW, POLICY)
    assert (found.record is None) == wait
    assert [each.nodes for each in found.incidents if each.cause == "cut_off"] == ([("b",)] if wait else [])


def test_no_node_is_cut_off_if_all_have_a_lease() -> None:
    assert cut_off(missing(said(), nodes={A: node("a"), B: node("b")}), NOW, LEASE_S) == ()


def test_without_the_life_of_a_lease_only_the_last_word_counts() -> None:
    assert cut_off(missing(said()), NOW, 0.0) == (B,)
    assert cut_off(missing(said(), heard_s=4.0), NOW, 0.0) == ()


POLICY = Policy(lease_s=LEASE_S)


def test_it_is_told_once_and_nothing_is_done() -> None:
    decision = decide(missing(said()), NOW, POLICY)
    assert decision.record is None
    (told,) = decision.incidents
    assert (told.cause, told.rung, told.nodes, told.open) == ("cut_off", 0, ("b",), True)
    assert decide(missing(said(), incidents=(told,)), NOW, POLICY) == Decision()
    back = missing(said(), incidents=(told,), nodes={A: node("a"), B: node("b"), NodeId("c"): node("c")})
    (over,) = decide(back, NOW, POLICY).incidents
    assert over == replace(told, open=False)


def test_a_dead_node_is_replaced_as_usual() -> None:
    decision = decide(missing(said(silent_s=6.7, ago_s=0.0), heard_s=7.0), NOW, POLICY)
    assert decision.record
    assert [*decision.record.members] == ["a", "c"]
    assert [i.cause for i in decision.incidents] == ["agent_lost"]


def test_a_stop_does_not_wait_for_a_cut_off_node() -> None:
    stop = Request(kind=Wish.STOP, exit_code=130, at_s=NOW - 1, by="SIGINT")
    decision = decide(missing(said(), requests=(stop,)), NOW, POLICY)
    assert decision.record
    assert decision.record.phase is Phase.ENDING
    over = decide(missing(said(), record=decision.record, acks={A: ack(AckKind.ENDED)}), NOW, POLICY)
    assert over.record
    assert over.record.phase is Phase.ENDED
