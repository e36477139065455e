"""(World, now, policy) → what to write."""

from dataclasses import replace

import pytest

from mt_resilient.resilience.decide.decide import decide
from mt_resilient.resilience.decide.events import STORAGE_S
from mt_resilient.resilience.decide.policy import Policy
from mt_resilient.resilience.errors import BudgetSpent, MachineError, UsageError
from mt_resilient.resilience.model.cluster_state import World
from mt_resilient.resilience.model.generation import Decision, GenerationRecord
from mt_resilient.resilience.model.node import AckKind, NodeStatus, Spec
from mt_resilient.resilience.model.request import Request, Wish
from mt_resilient.resilience.model.signals import InPlaceRewind
from mt_resilient.resilience.model.state_machine import TABLE, Event, Move, Phase
from mt_resilient.resilience.model.types import Generation, NodeId, Step
from mt_resilient.resilience.plan.recoverable_state import step_reached
from mt_resilient.resilience.report import status_view

from .worlds import NOW, A, B, ack, gone, incident, mismatch, node, record, status, world

POLICY = Policy()
STOP = Request(kind="stop", snapshot=True, exit_code=130, at_s=NOW - 1, by="SIGINT")


def decided(judged: World) -> Decision:
    return decide(judged, NOW, POLICY)


def written(judged: World) -> GenerationRecord:
    """The record that is decided; there has to be one."""
    decision = decided(judged)
    assert decision.record
    return decision.record


# -- the first generation -------------------------------------------------------------------------------------------------


def test_the_first_generation_opens_when_all_nodes_are_there() -> None:
    waiting = world(record=None, spec=Spec(command=("torchrun",), sizes=(2,)), status={}, acks={})
    assert decided(waiting) == Decision()
    first = written(replace(waiting, nodes={B: node("b"), A: node("a")}))
    assert first == GenerationRecord(
        number=Generation(1),
        phase=Phase.GATHER,
        members={A: "agent-a", B: "agent-b"},
        reason="first start",
        opened_s=NOW,
    )
    assert list(first.members) == [A, B]


def test_a_job_that_has_left_snapshots_here_goes_on_counting() -> None:
    again = world(record=None, spec=Spec(command=("torchrun",), first_generation=Generation(5)))
    assert written(again).number == 5


def test_more_nodes_than_the_job_wants_are_left_out() -> None:
    several = world(record=None, nodes={B: node("b"), A: node("a")})
    assert set(written(several).members) == {A}


def test_nothing_opens_for_a_job_that_nobody_has_described() -> None:
    assert decided(world(record=None, spec=None)) == Decision()


def test_a_job_that_is_stopped_before_it_has_begun_is_over() -> None:
    """Its agents wait for others, and leave; the same command starts it again."""
    waits = world(record=None, spec=Spec(command=("torchrun",), sizes=(2,)), status={}, acks={}, requests=(STOP,))
    over = written(waits)
    assert (over.phase, over.exit_code, over.members, over.complete) == (Phase.ENDED, STOP.exit_code, {}, False)


def test_there_is_nothing_to_drain_before_a_job_has_begun() -> None:
    asked = Request(id="1", kind=Wish.DRAIN, node="a", instance="agent-a")
    waits = world(record=None, spec=Spec(command=("torchrun",)), status={}, acks={}, requests=(asked,))
    refused = decided(waits)
    assert refused.answers["1"].exit_code == UsageError.exit_code
    assert written(replace(waits, answers=refused.answers)).members


def test_for_whom_a_job_waits_is_said_until_it_has_begun() -> None:
    spec = Spec(command=("torchrun",), sizes=(2, 3), spares=1)
    waits = world(record=None, spec=spec, status={}, acks={})
    assert status_view.awaited(waits, NOW, 60) == "waiting for nodes: a is here; the job expects 2 or 3 and 1 spare"
    assert status_view.awaited(world(spec=spec, record=record(members=("a", "b"))), NOW, 60) == ""
    assert status_view.awaited(world(spec=spec), NOW, 60), "all had died, and it has been given again for more"


# -- what the World amounts to ---------------------------------------------------------------------------------------------

FAULTY = {"status": {A: status(max_step=10, exits=(gone(started=True),))}}
BURNT = {**FAULTY, "incidents": tuple(incident(n, resume_step=10) for n in (1, 2, 3))}
WORLDS: dict[Event, dict] = {
    Event.READY: {"acks": {A: ack(AckKind.READY)}},
    Event.RUNNING: {},
    Event.FAULT: {
        "status": {A: status(max_step=10, exits=(gone(started=True),))},
        "record": lambda phase: record(
            phase, **({"complete": True, "replay_until": 10} if phase is Phase.ENDING else {})
        ),
        "nodes": lambda phase: {} if phase is Phase.ENDING else {A: node()},
        "acks": {},
    },
    Event.FINISHED: {"status": {A: status(finished=True)}},
    Event.STOP: {"requests": (STOP,)},
    Event.GIVE_UP: BURNT,
    Event.GONE: {"acks": {A: ack(AckKind.ENDED)}},
    Event.MEMBERS: {
        "spec": Spec(command=("torchrun",), sizes=(1, 2)),
        "nodes": {A: node("a"), B: node("b")},
        "status": {A: status(max_step=9, stepped_s=1.0, paused=True, durable_steps=(9,))},
        "acks": {},
        "record": lambda phase: (
            record(phase, moving="b joins", moving_s=NOW - 1)
            if phase is not Phase.GATHER
            else record(phase, members=("a", "c"))
        ),
    },
}
"""Each as it shows to the controller, whatever the phase."""


def shown(phase: Phase, event: Event) -> World:
    """A callable stands for what differs from phase to phase."""
    fields = {"record": record, **WORLDS[event]}
    return world(**{name: each(phase) if callable(each) else each for name, each in fields.items()})


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("phase", Phase)
def test_each_event_moves_the_record_as_the_table_says(phase: Phase, event: Event) -> None:
    decision = decided(shown(phase, event))
    move, target = TABLE[phase, event]
    if move is Move.IGNORE:
        assert decision.record is None
        return
    assert decision.record
    assert decision.record.phase is target
    assert decision.record.number == (2 if move is Move.REOPEN else 1)


def test_a_healthy_running_job_is_left_alone() -> None:
    assert decided(world()) == Decision()
    assert decided(world(acks={})) == Decision()


@pytest.mark.parametrize(
    ("stronger", "weaker"),
    [
        (Event.STOP, Event.FAULT),
        (Event.STOP, Event.GIVE_UP),
        (Event.STOP, Event.READY),
        (Event.FAULT, Event.READY),
        (Event.FAULT, Event.RUNNING),
        (Event.FINISHED, Event.RUNNING),
    ],
)
def test_which_event_goes_first(stronger: Event, weaker: Event) -> None:
    apart, alone = shown(Phase.LAUNCH, weaker), shown(Phase.LAUNCH, stronger)
    both = replace(apart, **{name: getattr(alone, name) for name in WORLDS[stronger]})
    assert written(both) == written(alone)


@pytest.mark.parametrize(
    ("statuses", "over"),
    [
        ({A: status(finished=True), B: status(finished=True)}, True),
        ({A: status(finished=True), B: status(stopped=True)}, True),
        ({A: status(finished=True), B: status()}, False),
        ({A: status(finished=True)}, False),
        ({A: status(finished=True), B: status(2, finished=True)}, False),
    ],
)
def test_a_job_is_over_when_all_nodes_say_so(statuses: dict, over: bool) -> None:
    two = world(record=record(members=("a", "b")), nodes={A: node("a"), B: node("b")}, status=statuses)
    assert (decided(two).record is not None) is over


# -- moving on ---------------------------------------------------------------------------------------------------------------


def test_a_launch_says_from_where_and_how_to_meet() -> None:
    gathered = world(
        record=record(Phase.GATHER, 2, ("a", "b"), replay_until=Step(10)),
        nodes={A: node("a"), B: node("b")},
        status={A: status(2, memory_steps=(8, 9)), B: status(2, memory_steps=(8,), durable_steps=(5,))},
        acks={A: ack(AckKind.READY, 2, "a", port=29501), B: ack(AckKind.READY, 2, "b", port=29502)},
    )
    older = {
        **gathered.status,
        B: status(1, memory_steps=(7,)),
    }  # written over it by a call that nobody waited for any more
    assert decided(replace(gathered, status=older)).record is None
    decision = decided(gathered)
    assert decision.record == replace(
        record(Phase.GATHER, 2, ("a", "b"), replay_until=Step(10)),
        phase=Phase.LAUNCH,
        resume_step=Step(8),
        master_port=29501,
        launched_s=NOW,
    )
    assert decision.reason == "step 8 from memory"


def test_storage_that_has_not_answered_yet_is_waited_for() -> None:
    """Of a large bucket, the names alone take longer than an agent needs to be ready."""
    two = {"record": record(Phase.GATHER, members=("a", "b")), "nodes": {A: node("a"), B: node("b")}}
    acks = {A: ack(AckKind.READY), B: ack(AckKind.READY, name="b")}
    here, blind = status(durable_steps=(Step(8),)), status(storage=False)
    waits = world(**two, acks=acks, status={A: here, B: blind})
    assert decided(waits) == Decision()
    assert status_view.awaited(waits, NOW) == "waiting for the storage of the snapshots, which has not answered b yet"
    assert written(replace(waits, status={A: here, B: here})).resume_step == 8
    assert decide(waits, NOW + STORAGE_S - 2, POLICY) == Decision()
    late = decide(waits, NOW + STORAGE_S, POLICY).record
    assert late
    assert (late.phase, late.exit_code) == (Phase.ENDING, MachineError.exit_code)
    assert "no snapshot can be read at present" in late.reason


def test_no_launch_before_every_member_is_ready() -> None:
    two = {"record": record(Phase.GATHER, members=("a", "b")), "nodes": {A: node("a"), B: node("b")}}
    assert decided(world(acks={A: ack(AckKind.READY)}, **two)) == Decision()
    mixed = {A: ack(AckKind.READY), B: ack(AckKind.RUNNING, name="b")}
    assert decided(world(acks=mixed, **two)) == Decision()


@pytest.mark.parametrize(("since_s", "launches"), [(0, False), (24.9, False), (25, True), (-3600, True), (3600, True)])
def test_ranks_whose_starts_fail_start_after_the_pause(since_s: float, launches: bool) -> None:
    """Whatever the clock of the node that leads now says of when it began."""
    gathers = record(Phase.GATHER, 2, opened_s=NOW - since_s, pause_s=25.0)
    decision = decided(world(record=gathers, acks={A: ack(AckKind.READY, 2)}, status={A: status(2)}))
    assert (decision.record is not None and decision.record.phase is Phase.LAUNCH) is launches


def test_a_request_is_carried_out_as_it_was_made() -> None:
    ending = written(world(requests=(STOP,)))
    assert (ending.phase, ending.exit_code, ending.last_snapshot) == (Phase.ENDING, 130, True)
    assert ending.reason == "stopped by SIGINT"


def test_the_end_of_training_exits_with_0() -> None:
    ending = written(world(**WORLDS[Event.FINISHED]))
    assert (ending.exit_code, ending.last_snapshot, ending.reason) == (0, False, "the training is over")


# -- faults ------------------------------------------------------------------------------------------------------------------


def test_a_fault_opens_the_next_generation_and_an_incident() -> None:
    decision = decided(world(**FAULTY))
    assert decision.record == GenerationRecord(
        number=Generation(2),
        phase=Phase.GATHER,
        members={A: "agent-a"},
        replay_until=Step(10),
        reason="rank 0 on a was killed by signal 9",
        opened_s=NOW,
    )
    (opened,) = decision.incidents
    assert (opened.id, opened.generation, opened.step_at_fault, opened.open) == ("0001", 1, 10, True)
    assert opened.phases_s == {"detect": 0.5}
    assert opened.resume_step is None


def test_the_next_generation_is_of_the_agents_that_are_there_now() -> None:
    restarted = written(world(nodes={A: node(instance="anew")}))
    assert restarted.members == {A: "anew"}
    two = Spec(command=("torchrun",), sizes=(2,))
    lost = written(world(spec=two, record=record(members=("a", "b")), nodes={B: node("b")}))
    assert lost.members == {A: "agent-a", B: "agent-b"}  # its agent may come back


@pytest.mark.parametrize(("before_s", "known_s"), [(0.0, 4.0), (90.0, 90.0)])
def test_a_new_agent_learns_how_long_first_steps_have_taken_at_most(before_s: float, known_s: float) -> None:
    hit = {A: status(max_step=10, exits=(gone(started=True),), warmup_s=3.0), B: status(0, warmup_s=4.0)}
    assert written(world(status=hit, record=record(warmup_s=before_s))).warmup_s == known_s


@pytest.mark.parametrize("waits", [True, False])
def test_only_an_ordered_snapshot_that_is_still_waited_for_is_taken_by_the_next_generation(waits: bool) -> None:
    """The command deletes its request and the answer once it has read the answer."""
    asked = Request(id="7", kind=Wish.SNAPSHOT, at_s=NOW - 1, by="root")
    restarted = written(
        world(
            nodes={A: node(instance="anew")}, record=replace(record(), snapshot="7"), requests=(asked,) if waits else ()
        )
    )
    assert restarted.snapshot == ("7" if waits else "")


def test_a_fault_during_a_recovery_does_not_forget_how_far_the_job_had_come() -> None:
    gathering = record(Phase.GATHER, 2, replay_until=Step(10))
    again = decided(world(record=gathering, nodes={A: node(instance="anew")}, status={}, incidents=(incident(),)))
    assert again.record
    assert again.record.replay_until == 10
    replaying = record(Phase.RUN, 2, resume_step=Step(4), replay_until=Step(10))
    hit = world(record=replaying, status={A: status(2, max_step=6, exits=(gone(),))}, incidents=(incident(),))
    assert written(hit).replay_until == 10
    assert [i.step_at_fault for i in decided(hit).incidents if i.id == "0002"] == [6]


def test_giving_up_ends_the_job_and_closes_its_incidents() -> None:
    decision = decided(world(**BURNT))
    assert decision.record
    assert (decision.record.phase, decision.record.exit_code) == (Phase.ENDING, BudgetSpent.exit_code)
    assert not decision.record.last_snapshot
    assert [(i.id, i.open) for i in decision.incidents] == [(f"{n:04d}", False) for n in (1, 2, 3, 4)]
    assert [i.lost_steps for i in decision.incidents] == [0, 0, 0, 0]


@pytest.mark.parametrize("event", [Event.STOP, Event.FINISHED])
def test_no_recovery_goes_on_while_the_job_ends(event: Event) -> None:
    recovering = world(record=record(Phase.RUN, 2), **{"incidents": (incident(),), **_of_generation_2(event)})
    decision = decided(recovering)
    assert decision.record
    assert decision.record.phase is Phase.ENDING
    assert [(i.id, i.open) for i in decision.incidents] == [("0001", False)]


def _of_generation_2(event: Event) -> dict:
    return {"requests": (STOP,)} if event is Event.STOP else {"status": {A: status(2, finished=True)}}


def test_the_end_does_not_wait_for_an_agent_that_is_no_more() -> None:
    ending = {"record": record(Phase.ENDING, exit_code=130), "acks": {}}
    assert decided(world(**ending)) == Decision()
    for nodes in ({}, {A: node(instance="anew")}):
        over = written(world(nodes=nodes, **ending))
        assert (over.phase, over.exit_code) == (Phase.ENDED, 130)


def ended(**changes: object) -> World:
    """Two of three nodes have trained to step 10, and the state of it is not on disk yet; `b` has written its part."""
    healthy: dict = {
        "spec": Spec(command=("torchrun",), sizes=(2,), spares=1),
        "record": record(Phase.ENDING, members=("a", "b"), complete=True, replay_until=Step(10)),
        "nodes": {NodeId(name): node(name) for name in "abc"},
        "status": {n: status(durable_steps=(5,)) for n in (A, B)},
        "acks": {B: ack(AckKind.ENDED, name="b")},
    }
    return world(**{**healthy, **changes})


def without(*names: str) -> dict:
    return {NodeId(name): node(name) for name in "abc" if name not in names}


@pytest.mark.parametrize(
    ("changes", "goes_on"),
    [
        ({"nodes": without("a")}, True),
        ({"nodes": without("b")}, False),  # its part is there
        ({"nodes": without("a", "b")}, True),
        ({}, False),
        ({"nodes": without("a"), "status": {A: status(), B: status(durable_steps=(10,))}}, False),
        (
            {"nodes": without("a"), "record": record(Phase.ENDING, members=("a", "b"), complete=True, replay_until=-1)},
            False,
        ),
        ({"nodes": without("a"), "record": record(Phase.ENDING, members=("a", "b"), exit_code=130)}, False),
        ({"nodes": without("a"), "requests": (STOP,)}, False),
        (
            {
                "nodes": without("a", "b"),
                "spec": Spec(command=("torchrun",), sizes=(2,), first_generation=Generation(2)),
            },
            False,
        ),
        ({"nodes": without("a"), "incidents": BURNT["incidents"]}, False),
    ],
)
def test_the_job_has_not_ended_when_a_node_takes_the_last_state_along(changes: dict, goes_on: bool) -> None:
    decision = decided(ended(**changes))
    reopened = decision.record is not None and decision.record.number == 2
    assert reopened is goes_on
    if decision.record and reopened:
        assert (decision.record.phase, decision.record.complete, decision.record.replay_until) == (
            Phase.GATHER,
            False,
            10,
        )
        assert (decision.incidents[-1].cause, decision.incidents[-1].step_at_fault) == ("agent_lost", 10)
        assert "of step 10, was not on disk" in " ".join(decision.incidents[-1].evidence)


def test_the_job_ends_without_a_part_where_another_life_would_not_help() -> None:
    """The budget is spent: it ends as it was about to, once nothing is left of it."""
    over = written(ended(nodes=without("a"), incidents=BURNT["incidents"]))
    assert over.phase is Phase.ENDED


# -- incidents ---------------------------------------------------------------------------------------------------------------


def test_ids_are_new_however_many_incidents_are_told_at_once() -> None:
    rewind = InPlaceRewind(
        ordinal=1,
        generation=Generation(2),
        cause="non_finite",
        onset=Step(7),
        to=Step(6),
        reached=Step(8),
        remedy="replay",
        at_s=NOW - 3,
        restore_s=0.1,
    )
    said = status(2, max_step=10, attached_s=NOW - 80, rewinds=(rewind,), exits=(gone(),))
    hit = world(
        record=record(Phase.RUN, 2, resume_step=Step(6)), status={A: said}, incidents=(incident(1, 1), incident(4, 1))
    )
    told = decided(hit).incidents
    ids = [i.id for i in told]
    assert len(ids) == len(set(ids))
    fresh = [i for i in told if i.id not in ("0001", "0004")]
    assert [(i.id, i.rung) for i in fresh] == [("0005", 1), ("0006", 2)]


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("phase", Phase)
def test_a_decision_that_was_written_makes_the_next_one_empty(phase: Phase, event: Event) -> None:
    before = shown(phase, event)
    decision = decided(before)
    told = {i.id: i for i in (*before.incidents, *decision.incidents)}
    after = decision.record or before.record
    assert after
    acks = before.acks if after.number == 1 else {}  # read_world knows those of the record's generation only
    there = replace(before, record=after, incidents=tuple(told.values()), acks=acks, answers=decision.answers)
    assert decided(there) == Decision()


# -- how far the job has come --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statuses", "resume", "reached"),
    [
        ({A: status(max_step=10)}, -1, 10),
        ({A: status(max_step=10), B: status(max_step=12)}, -1, 12),
        ({A: status(max_step=-1)}, 8, 8),
        ({A: status(max_step=9)}, 8, 9),
        ({A: status(2, max_step=99)}, 8, 8),
        ({}, 8, 8),
        ({}, -1, -1),
    ],
)
def test_step_reached(statuses: dict[str, NodeStatus], resume: int, reached: int) -> None:
    there = world(record=record(members=("a", "b"), resume_step=Step(resume)), status=statuses)
    assert step_reached(there) == reached


def test_a_mismatch_bounds_where_the_job_goes_on() -> None:
    said = {"memory_steps": (7, 9), "durable_steps": (5,), "agreed_steps": (5, 7, 9)}
    decision = decided(world(status={A: status(max_step=10, mismatches=(mismatch(),), **said)}))
    (opened,) = decision.incidents
    assert (opened.cause, opened.onset, opened.rung) == ("fingerprint_mismatch", 8, 2)
    ready = world(
        record=decision.record,
        status={A: status(2, mismatches=(mismatch(),), **said)},
        acks={A: ack(AckKind.READY, 2, port=1234)},
        incidents=decision.incidents,
    )
    assert written(ready).resume_step == 7


def test_who_was_wrong_is_told_when_it_is_known_later() -> None:
    found = mismatch(wrong=(), ranks=(0, 1))
    hit = world(status={A: status(max_step=10, mismatches=(found,))})
    (opened,) = decided(hit).incidents
    later = replace(opened, open=False, resume_step=Step(7))
    known = replace(found, wrong=(1,), replayed=True)
    running = world(record=record(number=2), status={A: status(2, mismatches=(known,))}, incidents=(later,))
    (told,) = decided(running).incidents
    assert "a replay of step 8 gave the other ranks' values on all ranks: rank 1 was wrong" in told.evidence[-1]
    assert not told.open
    assert decided(replace(running, incidents=(told,))).incidents == ()


def test_weights_that_stand_still_are_told_once_and_nothing_is_done() -> None:
    still = world(status={A: status(max_step=300, frozen=Step(100))})
    decision = decided(still)
    assert decision.record is None
    (told,) = decision.incidents
    assert (told.cause, told.rung, told.open) == ("frozen", 0, True)
    assert decided(replace(still, incidents=(told,))).incidents == ()
    (over,) = decided(replace(still, status={A: status(max_step=310)}, incidents=(told,))).incidents
    assert not over.open


def test_what_memory_holds_from_before_a_break_is_told_apart() -> None:
    three = Spec(command=("torchrun",), sizes=(2,), spares=1)
    hit = {"status": {A: status(max_step=10, exits=(gone(started=True),))}, "spec": three}
    here = {A: node("a"), B: node("b"), NodeId("c"): node("c")}
    kept = world(record=record(members=("a", "b")), nodes=here, **hit)
    assert written(kept).joined == {}
    replaced = world(record=record(members=("a", "b")), nodes={A: here[A], NodeId("c"): here[NodeId("c")]}, **hit)
    assert written(replaced).joined == {"c": 2}
    later = world(record=record(number=7, members=("a", "c"), joined={"c": Generation(2)}), nodes=here, spec=three)
    lost = replace(later, nodes={A: here[A], B: here[B]}, status={})
    assert written(lost).joined == {"b": 8}
    again = replace(later, status={A: status(7, exits=(gone(started=True),))})
    assert written(again).joined == {"c": 2}
