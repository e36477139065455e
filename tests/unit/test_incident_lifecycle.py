"""The story of each incident, as the World tells it bit by bit."""

from dataclasses import replace
from typing import Any

import pytest

from mt_resilient.resilience.detect.registry import suspect
from mt_resilient.resilience.diagnose.root_cause import judge
from mt_resilient.resilience.incidents.alerts import complaints_told, shortages_told
from mt_resilient.resilience.incidents.lifecycle import open_incident, phases_told
from mt_resilient.resilience.incidents.rewinds import rewinds_told
from mt_resilient.resilience.inprocess.rewind_ladder import LadderPolicy
from mt_resilient.resilience.model.cause import Kind
from mt_resilient.resilience.model.cluster_state import World
from mt_resilient.resilience.model.data_windows import Window
from mt_resilient.resilience.model.incident import PHASES, Incident
from mt_resilient.resilience.model.node import NodeStatus
from mt_resilient.resilience.model.rewind import AGAIN, Origin, Remedy, Turn
from mt_resilient.resilience.model.signals import Complaint, InPlaceRewind, Shortage, Sighting
from mt_resilient.resilience.model.state_machine import Event, Phase
from mt_resilient.resilience.model.types import Generation, Step
from mt_resilient.resilience.plan.escalation import Plan
from mt_resilient.resilience.report.explain import recovered

from .worlds import NOW, A, B, gone, incident, node, record, status, world

POLICY = LadderPolicy()
MARKS = ("attached_s", "built_s", "restored_s", "stepped_s", "replayed_s")


def rewind(
    ordinal: int = 1,
    generation: int = 1,
    onset: int = 7,
    to: int = 6,
    remedy: Remedy = Remedy.REPLAY,
    window: Window | None = None,
) -> InPlaceRewind:
    return InPlaceRewind(
        ordinal=ordinal,
        generation=Generation(generation),
        cause="non_finite",
        onset=Step(onset),
        to=Step(to),
        reached=Step(onset + 1),
        remedy=remedy,
        window=window,
        at_s=NOW - 3,
        restore_s=0.0123456,
    )


def recovering(so_far: int, *, launched: bool = True, resume: int = 8, until: int = 10, **changes: object) -> World:
    """Generation 2 follows incident 1; `so_far` of its marks are there, ten seconds apart."""
    marks = {name: NOW - 80 + 10 * position for position, name in enumerate(MARKS[:so_far])}
    phase = Phase.RUN if launched else Phase.GATHER
    started = record(phase, 2, resume_step=Step(resume) if launched else Step(-1), replay_until=Step(until))
    said = {"record": started, "status": {A: status(2, launch="warm", **marks)}, "incidents": (incident(),)}
    return world(**{**said, **changes})


@pytest.mark.parametrize(("resume", "other_data", "told"), [(8, True, True), (8, False, False), (-1, True, False)])
def test_a_recovery_tells_whether_the_data_could_be_put_back(resume: int, other_data: bool, told: bool) -> None:
    """From the script's own start, the data begins anew too."""
    marks = {name: NOW - 80 + 10 * position for position, name in enumerate(MARKS)}
    said = {A: status(2, launch="warm", other_data=other_data, **marks)}
    (over,) = phases_told(recovering(5, resume=resume, status=said))
    assert (over.open, over.other_data) == (False, told)
    assert ("could not be put back" in recovered(over)) is told


def test_an_incident_tells_what_was_seen_and_concluded() -> None:
    exits = (
        gone(0, traceback="Traceback 0"),
        gone(1, at_s=NOW, code=1, error="RuntimeError: closed", traceback="Traceback 1"),
    )
    hit = world(status={A: status(max_step=10, exits=exits)}, incidents=(incident(4), incident(5)))
    verdict = judge(suspect(hit))
    assert verdict
    answer = Plan(event=Event.FAULT, rung=2, reason="start it again")
    opened = open_incident(hit, verdict, answer, Step(10))
    assert replace(opened, weighed=()) == Incident(
        id="0006",
        generation=Generation(1),
        cause="rank_killed",
        rung=2,
        summary="rank 0 on a was killed by signal 9",
        evidence=(
            "rank 0 on a was killed by signal 9",
            "also seen, as a consequence: rank 1 on a exited with code 1: RuntimeError: closed",
            "Traceback 0",
        ),
        plan="start it again",
        at_s=NOW - 0.5,
        step_at_fault=Step(10),
        started=False,
        nodes=(A,),
        size=1,
        signature="rank_killed:-9:",
    )


def told_of(*rewinds: InPlaceRewind, step: int = 6, earlier: tuple[Incident, ...] = ()) -> tuple[Incident, ...]:
    said = status(rewinds=rewinds, min_step=Step(step), max_step=Step(step))
    return rewinds_told(world(status={A: said}, incidents=earlier), POLICY)


def test_the_traceback_in_an_incident_is_that_of_the_rank_that_is_blamed() -> None:
    """Its peers, whose nodes come first by name, fail a moment later because of it."""
    peers = (gone(0, at_s=NOW, code=1, error="RuntimeError: Connection closed", traceback="Traceback of a peer"),)
    first = (gone(2, at_s=NOW - 0.4, code=1, error="ValueError: no", traceback="Traceback of the first"),)
    hit = world(
        nodes={A: node("a"), B: node("b")},
        record=record(members=("a", "b")),
        status={A: status(max_step=10, exits=peers), B: status(max_step=10, exits=first)},
    )
    verdict = judge(suspect(hit))
    assert verdict
    opened = open_incident(hit, verdict, Plan(event=Event.FAULT, rung=2, reason="start it again"), Step(10))
    assert opened.evidence[-1] == "Traceback of the first", opened


def test_a_rewind_is_told_once_as_soon_as_it_is_known() -> None:
    before = (incident(1),)
    (told,) = told_of(rewind(), earlier=before)
    assert (told.id, told.rung, told.open, told.resume_step) == ("0002", 1, True, 6)
    assert (told.step_at_fault, told.lost_steps) == (8, 2)  # the step after the bad one was finished when it was judged
    assert told.phases_s == {"restore": 0.0123}
    assert told.summary == "step 7 gave NaN or Inf"
    assert told_of(rewind(), earlier=(*before, told)) == ()


@pytest.mark.parametrize(
    ("remedy", "cured"),
    [
        (Remedy.REPLAY, Origin.TRANSIENT),
        (Remedy.REPLAY_EARLIER, Origin.STATE),
        (Remedy.REWIND, Origin.UNDECIDED),
        (Remedy.SKIP, Origin.DATA),
    ],
)
def test_it_is_over_some_steps_behind_the_fault_and_then_its_origin_is_known(remedy: Remedy, cured: Origin) -> None:
    made = rewind(remedy=remedy, window=Window(6, 7) if remedy is Remedy.SKIP else None)
    (told,) = told_of(made)
    assert told_of(made, step=10, earlier=(told,)) == ()
    (over,) = told_of(made, step=11, earlier=(told,))
    assert (over.open, over.origin) == (False, cured)
    assert over.turn == Turn(kind=Kind.NON_FINITE, onset=Step(7), to=Step(6), remedy=remedy, window=made.window)


def test_a_rewind_whose_fault_comes_again_has_not_helped() -> None:
    (first,) = told_of(rewind())
    again, second = told_of(rewind(), rewind(2), earlier=(first,))
    assert (again.id, again.open, again.origin) == (first.id, False, AGAIN)
    assert (second.id, second.open) == ("0002", True)


def test_a_rewind_for_another_fault_says_nothing_of_the_first() -> None:
    (first,) = told_of(rewind())
    (other,) = told_of(rewind(), rewind(2, onset=1000, to=5), earlier=(first,))
    assert (other.id, other.onset) == ("0002", 1000)


@pytest.mark.parametrize(("onset", "origin"), [(16, AGAIN), (17, Origin.TRANSIENT)])
def test_a_nan_that_comes_enough_steps_later_is_another_one_also_if_the_agent_hears_of_both_at_once(
    onset: int, origin: str
) -> None:
    both = rewind(), rewind(2, onset=onset, to=onset - 1)
    first, second = told_of(*both, earlier=told_of(rewind()), step=onset - 1)
    assert (first.open, first.origin, second.open) == (False, origin, True)


@pytest.mark.parametrize(
    ("onset", "after_s", "origin"), [(7, 1, AGAIN), (7, -1, Origin.TRANSIENT), (10, 1, Origin.TRANSIENT)]
)
def test_a_spike_that_a_replay_shows_again_did_recur(onset: int, after_s: int, origin: str) -> None:
    """The ranks replay such a spike once, and then wait for the loss to come back."""
    made = replace(rewind(), cause=Kind.GRADIENT_SPIKE)
    found = Sighting(
        ordinal=1,
        generation=made.generation,
        cause=made.cause,
        onset=Step(onset),
        seen=Step(onset),
        last=Step(onset),
        to=Step(6),
        remedy=Remedy.WAIT,
        at_s=made.at_s + after_s,
    )
    said = status(rewinds=(made,), sightings=(found,), min_step=Step(11), max_step=Step(11))
    (over,) = rewinds_told(world(status={A: said}, incidents=told_of(made)), POLICY)
    assert (over.open, over.origin) == (False, origin)


def test_when_the_training_is_over_so_is_the_fault() -> None:
    (first,) = told_of(rewind())
    ended = status(rewinds=(rewind(),), min_step=Step(8), max_step=Step(8), finished=True)
    (over,) = rewinds_told(world(status={A: ended}, incidents=(first,)), POLICY)
    assert over.origin == Origin.TRANSIENT


def test_one_rewind_that_two_nodes_report_is_one_incident() -> None:
    both = {A: status(rewinds=(rewind(), rewind(2, onset=900))), B: status(rewinds=(rewind(),))}
    told = rewinds_told(world(record=record(members=("a", "b")), status=both), POLICY)
    assert [(i.id, i.signature) for i in told] == [("0001", "rewind:1:1"), ("0002", "rewind:1:2")]


def test_the_same_rewind_of_another_generation_is_another_one() -> None:
    before = told_of(rewind())
    later = world(record=record(number=2), status={A: status(2, rewinds=(rewind(generation=2),))}, incidents=before)
    assert [i.id for i in rewinds_told(later, POLICY)] == ["0001", "0002"]  # the first has come again


@pytest.mark.parametrize("so_far", range(6))
def test_phase_times_come_in_one_by_one(so_far: int) -> None:
    expected = [10.0, 10.0, 10.0, 10.0, 10.0, 10.0]  # stop, then from launch to the first mark, and on
    (told,) = phases_told(recovering(so_far))
    assert told.phases_s == dict(zip(PHASES[1 : 2 + so_far], expected, strict=False))
    assert (told.resume_step, told.launch, told.open) == (8, "warm", so_far < 5)
    assert told.lost_steps == 2


def test_nothing_new_to_tell() -> None:
    (told,) = phases_told(recovering(3))
    assert phases_told(recovering(3, incidents=(told,))) == ()


def test_while_gathering_there_is_nothing_to_tell() -> None:
    assert phases_told(recovering(0, launched=False)) == ()


def test_a_node_that_has_not_reported_keeps_the_story_waiting() -> None:
    two = record(Phase.RUN, 2, ("a", "b"), resume_step=Step(8), replay_until=Step(10))
    assert all(set(told.phases_s) <= {"stop"} for told in phases_told(recovering(5, record=two)))


def test_a_phase_is_over_when_it_is_on_all_nodes() -> None:
    marks = {name: NOW - 80 + 10 * position for position, name in enumerate(MARKS)}
    two = record(Phase.RUN, 2, ("a", "b"), resume_step=Step(8), replay_until=Step(10))
    (told,) = phases_told(recovering(5, record=two, status={A: status(2, **marks), B: status(2, attached_s=NOW - 80)}))
    assert set(told.phases_s) == {"stop", "start"}
    assert told.open


def test_the_slowest_node_gives_the_time() -> None:
    marks = {name: NOW - 80 + 10 * position for position, name in enumerate(MARKS)}
    slow: NodeStatus = status(2, **{name: at_s + 5 for name, at_s in marks.items()})
    two = record(Phase.RUN, 2, ("a", "b"), resume_step=Step(8), replay_until=Step(10))
    (told,) = phases_told(recovering(5, record=two, status={A: status(2, **marks), B: slow}))
    assert told.phases_s["start"] == 15.0
    assert told.phases_s["build"] == 10.0


@pytest.mark.parametrize(("resume", "until"), [(8, 8), (-1, -1), (8, -1), (10, 8)])
def test_where_nothing_is_computed_again_the_first_step_ends_the_story(resume: int, until: int) -> None:
    (told,) = phases_told(recovering(4, resume=resume, until=until))
    assert not told.open
    assert told.phases_s["step"] == 10.0
    assert told.phases_s.get("replay", 0.0) == 0.0


@pytest.mark.parametrize(
    "other",
    [incident(open=False), incident(rung=1), incident(rung=6), incident(generation=2)],
    ids=["over", "a rewind", "a stop", "of this generation"],
)
def test_other_incidents_are_left_alone(other: Incident) -> None:
    assert phases_told(recovering(5, incidents=(other,))) == ()


def test_a_recovery_that_another_fault_interrupted_ends_with_the_next() -> None:
    both = (incident(1, generation=1), incident(2, generation=2))
    third = record(Phase.RUN, 3, resume_step=Step(8), replay_until=Step(10))
    marks = {name: NOW - 80 + 10 * position for position, name in enumerate(MARKS)}
    told = phases_told(recovering(0, record=third, status={A: status(3, **marks)}, incidents=both))
    assert [(i.id, i.open) for i in told] == [("0001", False), ("0002", False)]


def test_an_interrupted_recovery_remembers_where_it_had_resumed_from() -> None:
    (resumed,) = phases_told(recovering(2, resume=4))
    assert resumed.resume_step == 4
    third = record(Phase.RUN, 3, resume_step=Step(8), replay_until=Step(10))
    again = phases_told(recovering(0, record=third, status={A: status(3, attached_s=NOW)}, incidents=(resumed,)))
    assert all(told.resume_step == 4 for told in again)


@pytest.mark.parametrize(
    ("fields", "first", "told"),
    [
        ({"nodes": {A: node(), B: node("b")}}, 1, True),
        ({"nodes": {A: node()}, "record": record(members=("a", "b"))}, 1, True),
        ({"nodes": {A: node()}}, 1, False),
        ({"nodes": {A: node(), B: node("b")}}, 2, False),
    ],
    ids=["a spare", "a member that is cut off", "a node that has gone", "an earlier start of the job"],
)
def test_what_a_node_complained_of_is_told_while_it_belongs_to_the_job(
    fields: dict[str, Any], first: int, told: bool
) -> None:
    short = Shortage(at_s=NOW - 5, left_bytes=1, lasts_s=60.0, per_s=1, grows="rank 1", grows_per_s=1)
    sick = Complaint(device="GPU 1", words="it does not answer", at_s=NOW - 5, step=9)
    seen = world(**fields, status={B: status(complaints=(sick,), shortage=short)})
    seen = replace(seen, spec=replace(seen.spec, first_generation=Generation(first)))
    assert (bool(complaints_told(seen)), bool(shortages_told(seen, observe=False))) == (told, told)
