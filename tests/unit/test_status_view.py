"""What `status` shows of a World."""

from dataclasses import replace
from typing import Any

import pytest

from mt_resilient.resilience.membership.node_roles import leader, roles
from mt_resilient.resilience.model.cluster_state import World
from mt_resilient.resilience.model.generation import Quarantine
from mt_resilient.resilience.model.node import NodeStatus, Spec
from mt_resilient.resilience.model.request import Answer, Request, Wish
from mt_resilient.resilience.model.signals import Held
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import Generation, NodeId, Step
from mt_resilient.resilience.report import status_view

from .worlds import NOW, A, B, incident, node, record, status, world

C = NodeId("c")
HELD = str(Held(model="m", words={(1, 0, step): step for step in range(5)}))
SPEC = Spec(command=("torchrun", "train.py"), sizes=(2,), spares=1)
SHUT_OUT = Quarantine(reason="1 fault has struck it within 24 h", until_s=NOW + 60)


def trio(there: str = "abc", **changes: Any) -> World:
    """a and b train, c stands by; who is not in `there` is gone."""
    told = {NodeId(name): status(max_step=9, min_step=9, alive=2 * (name != "c")) for name in "abc"}
    nodes = {NodeId(name): node(name) for name in there}
    return world(**{"spec": SPEC, "record": record(members=("b", "a")), "nodes": nodes, "status": told, **changes})


def when(at_s: float) -> str:
    return f"at {at_s:.0f}"


def left(**fields: Any) -> dict[NodeId, NodeStatus]:
    return {A: status(), B: status(), C: status(**fields)}


@pytest.mark.parametrize(
    ("judged", "expected"),
    [
        (trio(), "trains, trains, stands by"),
        (trio("ab"), "trains, trains, gone"),
        (trio("ab", status=left(drained=True)), "trains, trains, drained"),
        (trio("ac"), "gone, trains, stands by"),
        (trio("ac", incidents=(incident(cause="cut_off", nodes=(B,)),)), "cut off, trains, stands by"),
        (trio("ac", incidents=(incident(cause="cut_off", nodes=(B,), open=False),)), "gone, trains, stands by"),
        (trio("ac", incidents=(incident(cause="cut_off", nodes=(A,)),)), "gone, trains, stands by"),
        (trio(nodes={A: node(), B: node("b", "anew"), C: node("c")}), "gone, trains, stands by"),
        (trio(record=record(members=("b", "a"), dismissed=("agent-c",))), "trains, trains, drained"),
        (trio(record=record(members=("b", "a"), dismissed=("agent-b",))), "drained, trains, stands by"),
        (trio(quarantine={C: SHUT_OUT}), "trains, trains, shut out"),
        (trio(quarantine={C: replace(SHUT_OUT, until_s=NOW)}), "trains, trains, stands by"),
        (trio(nodes={A: node(), B: node("b"), C: replace(node("c"), fit="its disk")}), "trains, trains, not fit"),
        (trio(status={}), "trains, trains, stands by"),
    ],
)
def test_each_node_has_its_role(judged: World, expected: str) -> None:
    assert ", ".join(roles(judged, NOW).values()) == expected
    assert [*roles(judged, NOW)] == [B, A, C]


def test_before_the_first_generation_no_node_is_a_member() -> None:
    waiting = trio("ac", spec=replace(SPEC, first_generation=Generation(2)), record=record(Phase.ENDED))
    assert roles(waiting, NOW) == {A: "stands by", B: "gone", C: "stands by"}


@pytest.mark.parametrize(("instance", "node_"), [("agent-c", C), ("agent-a", A), ("", None), ("dead", None)])
def test_the_lines_name_the_leader(instance: str, node_: NodeId | None) -> None:
    judged = trio(leader=instance)
    assert leader(judged) == node_
    assert f"{node_ or 'no node'} leads" in status_view.lines(judged, NOW, when)
    assert "no node leads" not in status_view.lines(replace(judged, nodes={A: node()}), NOW, when), (
        "of one node all is clear"
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "generation 1, training"),
        ({"record": record(Phase.GATHER, members=("b", "a"))}, "generation 1, gathering"),
        ({"record": record()}, "waiting for nodes: a, b and c are here; the job expects 2 and 1 spare"),
        (
            {"record": record(Phase.LAUNCH, 2, members=("b", "a"), reason="x")},
            "generation 2, starting; it began after: x",
        ),
        ({"record": record(number=2, members=("b", "a"), reason="x")}, "generation 2, training; it began after: x"),
        ({"record": record(Phase.ENDING, reason="asked by root")}, "generation 1, ending: asked by root"),
        ({"record": record(Phase.ENDED, reason="asked by root")}, "generation 1, ended: asked by root"),
        ({"record": None, "nodes": {A: node()}}, "waiting for nodes: a is here; the job expects 2 and 1 spare"),
        (
            {
                "record": record(Phase.ENDED),
                "spec": replace(SPEC, first_generation=Generation(2)),
                "nodes": {A: node()},
            },
            "waiting for nodes: a is here; the job expects 2 and 1 spare",
        ),
        ({"record": None, "spec": None}, ""),
    ],
)
def test_the_headline_says_what_the_job_does(changes: dict[str, Any], sentence: str) -> None:
    assert status_view.headline(trio(**changes), NOW) == sentence


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (Request(kind=Wish.DRAIN, node="b"), "drain b"),
        (Request(kind=Wish.READMIT, node="b"), "readmit b"),
        (Request(kind=Wish.REWIND, step=Step(8)), "rewind to step 8"),
        (Request(kind=Wish.REWIND, step=Step(8), skip=2), "rewind to step 8, skip 2"),
        (Request(kind=Wish.SNAPSHOT), "snapshot"),
        (Request(kind="dance"), "dance"),
    ],
)
def test_an_order_that_waits_is_told_with_what_it_is_about(request_: Request, sentence: str) -> None:
    judged = trio(leader="agent-a", requests=(replace(request_, id="1", by="alice", at_s=NOW - 5),))
    assert status_view.lines(judged, NOW, when)[2:] == [f"ordered by alice, at 1995, and not done yet: {sentence}"]
    done = replace(judged, answers={"1": Answer(sentence="done")})
    assert status_view.lines(done, NOW, when)[2:] == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"quarantine": {C: SHUT_OUT}},
            "c is in quarantine until at 2060: 1 fault has struck it within 24 h; to end this now: mt-resilient readmit c",
        ),
        (
            {"quarantine": {B: SHUT_OUT}},
            "b is in quarantine until at 2060: 1 fault has struck it within 24 h; it still trains, because the job needs it",
        ),
        ({"record": record(Phase.GATHER, 2, ("b", "a")), "nodes": {A: node()}}, "the job waits for b"),
        (
            {"record": record(Phase.GATHER, 2, opened_s=NOW - 9, pause_s=25.0)},
            f"starts fail: the next one is at {NOW + 16:.0f}",
        ),
        ({"record": record(paused=True)}, "a pause is ordered; not all ranks wait yet"),
        (
            {"record": record(paused=True), "status": {A: status(paused=True)}},
            "paused: all ranks wait for the command mt-resilient resume",
        ),
        (
            {"record": record(moving="c takes the place of b")},
            "the ranks wait until their state is on disk, then continue on other nodes: c takes the place of b",
        ),
        ({"nodes": {A: replace(node(), fit="a is not used")}}, "a is not used"),
        (
            {"status": {A: status(held=HELD), B: status(held=HELD), C: status(held=HELD)}},
            "replicas are compared across nodes: a and b",
        ),
        ({"status": {A: status(observes=True)}}, "observing: the program does nothing about faults"),
        (
            {
                "status": {
                    A: status(certified_steps=(4, 8)),
                    B: status(certified_steps=(4,)),
                    C: status(certified_steps=(2,)),
                }
            },
            "newest certified snapshot: step 4",
        ),
    ],
)
def test_the_lines_name_whatever_an_operator_should_know(changes: dict[str, Any], sentence: str) -> None:
    assert sentence in status_view.lines(trio(**changes), NOW, when)


def test_a_row_shows_nothing_that_has_gone_with_its_agent() -> None:
    kept: dict[str, Any] = {"memory_steps": (8, 9), "durable_steps": (2, 4, 6, 8), "launch": "warm", "alive": 2}
    told = {
        B: status(min_step=8, max_step=9, **kept),
        A: replace(status(min_step=9, max_step=9, **kept), at_s=NOW - 500),
    }
    ranks = status_view.rows(trio(status=told), NOW, when)
    assert ranks[0] == ("b", "trains", "2", "8–9", "8, 9", "4, 6, 8", "warm", "1.0 s ago")
    assert ranks[2] == ("c", "stands by", "–", "–", "–", "–", "–", "–")
    gone = status_view.rows(trio("bc", status=told), NOW, when)
    leaving = status_view.rows(trio(status=told, record=record(members=("b", "a"), dismissed=("agent-b",))), NOW, when)
    assert leaving[0] == ("b", "drained", *ranks[0][2:]), "its ranks train until the next generation begins"
    anew = status_view.rows(trio(status=told, record=None), NOW, when)
    assert anew[0] == ("a", "stands by", "–", "9", "–", "4, 6, 8", "–", "at 1500"), "an agent before it has said that"
    assert gone[1] == ("a", "gone", "–", "9", "–", "4, 6, 8", "–", "at 1500")
