"""`--observe`: what is told of a fault, what follows from it (nothing), and when the job ends."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from mt_resilient.resilience.decide.decide import decide
from mt_resilient.resilience.decide.policy import Policy
from mt_resilient.resilience.inprocess.loss_level import Level
from mt_resilient.resilience.inprocess.loss_spike import Finding
from mt_resilient.resilience.inprocess.rewind_ladder import LadderPolicy, goes_on
from mt_resilient.resilience.inprocess.tally import Directive, Held, RankPolicy, Tally, judge
from mt_resilient.resilience.model.cause import Kind
from mt_resilient.resilience.model.cluster_state import World
from mt_resilient.resilience.model.generation import Decision
from mt_resilient.resilience.model.node import AckKind, NodeStatus
from mt_resilient.resilience.model.signals import Sighting
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import Generation, Step
from mt_resilient.resilience.plan import restart_history

from .worlds import NOW, A, ack, gone, mismatch, node, record, status, world

WATCHING = Policy(observe=True)


def observed(judged: World) -> Decision:
    return decide(judged, NOW, WATCHING)


def again(judged: World) -> Decision:
    """What is decided once the first decision was written."""
    return observed(replace(judged, incidents=(*judged.incidents, *observed(judged).incidents)))


def sighting(last: int, ordinal: int = 1) -> Sighting:
    return Sighting(
        ordinal=ordinal,
        generation=Generation(1),
        cause="non_finite",
        onset=Step(5),
        seen=Step(5),
        last=Step(last),
        to=Step(4),
        remedy="replay",
        at_s=NOW - 3,
    )


FAULTS = {
    "a killed rank": status(exits=(gone(1),), max_step=Step(9), min_step=Step(8)),
    "replicas apart": status(mismatches=(mismatch(onset=8),), max_step=Step(9), min_step=Step(9)),
    "a step with NaN": status(sightings=(sighting(5),), max_step=Step(6), min_step=Step(6)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_once_with_what_would_be_done_and_nothing_is(fault: str) -> None:
    judged = world(status={A: FAULTS[fault]})
    decision = observed(judged)
    assert decision.record is None
    (incident,) = decision.incidents
    assert incident.rung == 0
    assert incident.would in (1, 2)
    assert "did nothing" in incident.plan
    assert again(judged) == Decision()


def test_a_fault_of_figures_is_over_some_steps_after_its_last_sign() -> None:
    def at(step: int, last: int) -> NodeStatus:
        return status(sightings=(sighting(last),), min_step=Step(step), max_step=Step(step))

    (told,) = observed(world(status={A: at(6, 5)})).incidents
    for step, last, over in ((8, 7, False), (9, 7, False), (10, 7, True)):
        decision = observed(world(status={A: at(step, last)}, incidents=(told,)))
        assert [i.open for i in decision.incidents] == ([False] if over else []), step
    assert "last seen at step 7" in decision.incidents[0].evidence[-1]


@pytest.mark.parametrize(("launcher", "code"), [(1, 1), (-9, 137), (0, None), (None, None)])
def test_the_job_ends_when_its_launcher_has_ended_badly_and_with_its_code(
    launcher: int | None, code: int | None
) -> None:
    said = status(exits=(gone(1),), launcher_code=launcher, max_step=Step(9))
    decision = observed(world(status={A: said}))
    ending = decision.record if decision.record and decision.record.phase is Phase.ENDING else None
    assert (ending.exit_code if ending else None) == code
    assert [i.cause for i in decision.incidents] == ["rank_killed"]
    assert not (ending and any(incident.open for incident in decision.incidents))


def test_nothing_is_gone_back_to() -> None:
    kept = status(memory_steps=(Step(7),), durable_steps=(Step(4),), storage=False)
    ready = world(record=record(Phase.GATHER), status={A: kept}, acks={A: ack(AckKind.READY, port=5)})
    launch = observed(ready).record
    assert launch
    assert (launch.phase, launch.resume_step) == (Phase.LAUNCH, -1)


def test_whoever_starts_the_command_again_has_the_ranks_started() -> None:
    again = observed(world(nodes={A: node("a", "another process")}, status={A: status()})).record
    assert again
    assert (again.phase, again.number) == (Phase.GATHER, 2)


def test_what_was_observed_spends_no_budget() -> None:
    judged = world(status={A: status(mismatches=(mismatch(onset=8),), max_step=Step(9))})
    past = [replace(observed(judged).incidents[0], id=f"{n:04d}") for n in range(5)]
    assert restart_history.bound(past) == -1
    acting = decide(replace(judged, incidents=tuple(past)), NOW, Policy())
    assert acting.record
    assert acting.record.phase is Phase.GATHER, "the first mismatch that is acted upon, not the sixth"


@pytest.mark.parametrize(
    ("kind", "last", "seen", "same"),
    [
        (Kind.NON_FINITE, 10, 11, True),
        (Kind.NON_FINITE, 10, 210, True),
        (Kind.NON_FINITE, 10, 211, False),
        (Kind.LOSS_SPIKE, 10, 11, False),
    ],
)
def test_a_fault_that_goes_on_is_one_fault(kind: Kind, last: int, seen: int, same: bool) -> None:
    found = Finding(kind=Kind.NON_FINITE, onset=Step(seen), seen=Step(seen))
    assert goes_on(kind, last, found, LadderPolicy()) is same


def test_ranks_that_observe_find_the_same_and_go_on() -> None:
    said = Tally(step=Step(7), non_finite=True, loss=math.inf)
    acting, watching = (judge(said, (), Level(), (), RankPolicy(observe=observe)) for observe in (False, True))
    assert acting.directive is Directive.REWIND
    assert watching.directive is Directive.GO_ON
    assert (acting.finding, acting.answer) == (watching.finding, watching.answer)
    assert watching.newest is Held.MISSED, "what is not finite is not sealed"
    apart = judge(Tally(step=Step(7), same_step=False), (), Level(), (), RankPolicy(observe=True))
    assert (apart.directive, apart.newest) == (Directive.GO_ON, Held.MISSED)
