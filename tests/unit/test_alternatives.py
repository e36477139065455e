"""Which other explanations a verdict was chosen against, and what speaks against each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mt_resilient.resilience.decide.decide import decide
from mt_resilient.resilience.decide.policy import Policy
from mt_resilient.resilience.detect.registry import Suspicion, suspect
from mt_resilient.resilience.diagnose.alternatives import against
from mt_resilient.resilience.diagnose.root_cause import Verdict, judge
from mt_resilient.resilience.model.cause import Cause
from mt_resilient.resilience.model.cluster_state import World
from mt_resilient.resilience.model.incident import Because, Incident, Weighed
from mt_resilient.resilience.model.signals import Complaint
from mt_resilient.resilience.model.types import NodeId, Rank, Step
from mt_resilient.resilience.report import explain
from mt_resilient.resilience.store.codec import dumps, loads

from .stalls import stall
from .worlds import NOW, A, gone, status, world


def weighed(judged: World) -> dict[str, Because]:
    verdict = judge(suspect(judged))
    assert verdict
    return {each.cause: each.because for each in against(verdict, judged)}


def suspicion(cause: Cause, rank: int, at_s: float) -> Suspicion:
    return Suspicion(cause=cause, node=NodeId("a"), rank=Rank(rank), at_s=at_s, evidence="", signature="")


def test_peers_of_a_killed_rank_raise_and_want_of_memory_would_have_been_counted() -> None:
    raised = gone(0, NOW - 0.49, code=1, error="Connection closed by peer")
    assert weighed(world(status={A: status(exits=(gone(1), raised), agreed_steps=(Step(4), Step(7)), compared=2)})) == {
        Cause.SCRIPT_RAISED: Because.FOLLOWS,
        Cause.FINGERPRINT_MISMATCH: Because.AGREED,
        Cause.MEMORY_SHORT: Because.NOT_COUNTED,
    }


def test_nothing_is_said_against_what_was_the_case_or_is_not_known() -> None:
    killed = replace(gone(1), out_of_memory=True)
    assert weighed(world(status={A: status(exits=(killed,))})) == {}
    alone = status(exits=(killed,), agreed_steps=(Step(7),))  # as for a state of which no rank holds a replica
    assert weighed(world(status={A: alone})) == {}
    verdict = judge(suspect(world(status={A: status(exits=(killed,))})))
    assert verdict
    assert "OOM killer" in verdict.describe()
    perhaps = replace(gone(1), oom_killer_active=True)
    assert weighed(world(status={A: status(exits=(perhaps,))})) == {}


@pytest.mark.parametrize(
    ("cause", "later_s", "because"),
    [
        (Cause.RANK_HUNG, -60.0, Because.WAITS),
        (Cause.SCRIPT_RAISED, 0.01, Because.FOLLOWS),
        (Cause.SCRIPT_RAISED, -0.01, Because.FOLLOWS),
        (Cause.SCRIPT_RAISED, 5.0, Because.LATER),
        (Cause.RANK_KILLED, 0.5, Because.LATER),
    ],
)
def test_consequences_of_a_killed_rank(cause: Cause, later_s: float, because: Because) -> None:
    verdict = Verdict(
        cause=Cause.RANK_KILLED,
        blamed=(suspicion(Cause.RANK_KILLED, 3, NOW),),
        consequences=tuple(suspicion(cause, rank, NOW + later_s + rank / 1000) for rank in (0, 1, 2)),
        at_s=NOW,
    )
    (found,) = against(verdict, world(status={A: status()}))
    assert (found.because, found.ranks, found.by_s) == (because, (0, 1, 2), later_s), "one line for all ranks"


@pytest.mark.parametrize("fault", [{"exits": (gone(1),)}, {"stalls": (stall(1),)}])
def test_what_devices_complain_of_explains_what_strikes_their_node(fault: dict[str, Any]) -> None:
    old, new = "waits to be remapped", "Xid 79: it has fallen off the bus"
    said = [Complaint(device="GPU 1", words=words, at_s=NOW - s, step=9) for words, s in ((old, 3600), (new, 80))]
    decision = decide(world(status={A: status(complaints=tuple(said), **fault)}), NOW, Policy())
    *sick, struck = decision.incidents
    assert [(each.cause, each.rung, each.open) for each in sick] == [("device_sick", 0, False)] * 2
    assert {f"on the same node: GPU 1 on a: {words}" for words in (old, new)} <= {*struck.evidence}
    assert struck.summary.endswith(f"; around that time, GPU 1 on a: {new}")
    assert old not in struck.summary


def test_what_a_device_complained_of_long_ago_explains_nothing() -> None:
    old = Complaint(device="GPU 1", words="waits to be remapped", at_s=NOW - 3600, step=9)
    *_, killed = decide(world(status={A: status(exits=(gone(1),), complaints=(old,))}), NOW, Policy()).incidents
    assert "GPU 1" not in killed.summary


def test_a_story_says_it_and_survives_the_journal() -> None:
    incident = decide(
        world(status={A: status(exits=(gone(1),), agreed_steps=(Step(7),), compared=2)}), NOW, Policy()
    ).incidents[0]
    assert loads(Incident, dumps(incident)) == incident
    told = [line for line in explain.lines(incident, "now", "1") if "and not" in line]
    assert told == [
        "  and not    a flipped bit in a replica: the replicas were equal at step 7",
        "  and not    lack of memory: the kernel counted no OOM kill",
    ]


@pytest.mark.parametrize("because", Because)
def test_every_reason_has_its_words(because: Because) -> None:
    assert explain.weighed(Weighed(cause=Cause.SCRIPT_RAISED, because=because, ranks=(Rank(1),), by_s=0.01))
