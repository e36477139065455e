"""What becomes of an operator's requests: World → record, incidents, answers."""

from dataclasses import replace
from typing import Any

import pytest

from mt_resilient.resilience.decide.decide import decide
from mt_resilient.resilience.decide.operator_requests import HURRY_S, SAVE_S, cut_short, earlier, leaving, rule
from mt_resilient.resilience.decide.policy import Policy
from mt_resilient.resilience.diagnose.root_cause import Verdict
from mt_resilient.resilience.errors import MachineError, SnapshotError, UsageError
from mt_resilient.resilience.model.cluster_state import World
from mt_resilient.resilience.model.data_windows import Window
from mt_resilient.resilience.model.generation import Decision, Quarantine, RewindOrder
from mt_resilient.resilience.model.incident import turns
from mt_resilient.resilience.model.node import AckKind, Spec
from mt_resilient.resilience.model.request import Answer, Request, Wish
from mt_resilient.resilience.model.rewind import Remedy, Turn
from mt_resilient.resilience.model.signals import InPlaceRewind
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import Generation, NodeId, OrderedBy, Step
from mt_resilient.resilience.plan.escalation import RecoveryPolicy, plan

from .worlds import NOW, A, B, ack, gone, incident, node, record, status, world

KEPT: dict[str, Any] = {"memory_steps": (9, 10), "durable_steps": (4, 8), "max_step": 10, "min_step": 10}


def asked(kind: str = Wish.REWIND, ident: str = "1", **what: Any) -> Request:
    return Request(kind=kind, id=ident, at_s=NOW - 1, by="alice", **{"step": Step(8), **what})


def there(*requests: Request, said: dict[str, Any] | None = None, **changes: Any) -> World:
    """Ranks that train after step 10, and what is asked of them."""
    training = status(**{**KEPT, "stepped_s": NOW - 50, "skips": True, **(said or {})})
    return world(**{"requests": requests, "status": {A: training}, **changes})


def decided(judged: World) -> Decision:
    return decide(judged, NOW, Policy())


def after(judged: World, decision: Decision, said: dict[str, Any] | None = None) -> World:
    """`judged`, with the decision written and the node having said more."""
    known = replace(judged.status[A], **(said or {}))
    return replace(
        judged.with_incidents(decision.incidents),
        record=decision.record or judged.record,
        answers={**judged.answers, **decision.answers},
        status={A: known},
    )


def gone_back(number: int = 1, window: Window | None = None, **changes: Any) -> InPlaceRewind:
    told = {"ordinal": 1, "generation": Generation(1), "cause": "ordered", "onset": Step(9), "to": Step(8)}
    told |= {"reached": Step(12), "remedy": "skip" if window else "replay", "window": window, "order": number}
    return InPlaceRewind(**{**told, "at_s": NOW, "restore_s": 0.02, **changes})


# -- rewind --------------------------------------------------------------------------------------------------------------


def test_a_rewind_is_ordered_once_obeyed_once_and_answered_when_it_is_done() -> None:
    begun = there(asked(skip=2))
    ordered = decided(begun)
    assert ordered.record == replace(record(), rewind=RewindOrder(number=1, to=Step(8), skip=2))
    (opened,) = ordered.incidents
    assert (opened.cause, opened.rung, opened.open, opened.step_at_fault) == ("ordered", 1, True, 10)
    assert ordered.answers == {}
    waiting = after(begun, ordered)
    assert decided(waiting) == Decision(), "it is not ordered again while the ranks are on their way"
    obeyed = after(waiting, Decision(), {"rewinds": (gone_back(window=Window(8, 10)),)})
    told = decided(obeyed)
    (over,) = told.incidents
    assert (over.open, over.resume_step, over.lost_steps) == (False, 8, 4)
    assert over.turn == Turn(kind="ordered", onset=Step(9), to=Step(8), remedy=Remedy.SKIP, window=Window(8, 10))
    sentence = "all ranks have restored step 8, and skip batches 8 to 9"
    assert told.answers == {"1": Answer(sentence=sentence, step=Step(8))}
    assert decided(after(obeyed, told)) == Decision()


@pytest.mark.parametrize(
    ("wish", "said", "sentence"),
    [
        ({"step": Step(5)}, {}, "no snapshot of step 5 is kept: the nearest are 4 and 8. Nothing was done"),
        ({"step": Step(50)}, {}, "no snapshot of step 50 is kept: the nearest is 10. Nothing was done"),
        (
            {},
            {"memory_steps": (), "durable_steps": ()},
            "no snapshot of step 8 is kept: there is none. Nothing was done",
        ),
        ({"skip": 3}, {"skips": False}, "this script cannot skip data: its batches come neither from"),
        ({"skip": 3}, {"skips": False, "stepped_s": 0.0}, "only after its first step is it known"),
    ],
)
def test_an_impossible_rewind_is_refused_with_the_reason(
    wish: dict[str, Any], said: dict[str, Any], sentence: str
) -> None:
    judged = there(asked(**wish), said=said)
    refused = decided(judged)
    assert refused.record is None
    assert not refused.incidents
    assert sentence in refused.answers["1"].sentence
    assert refused.answers["1"].exit_code == UsageError.exit_code
    assert decided(after(judged, refused)) == Decision()


def test_a_state_that_has_gone_meanwhile_is_told_and_the_training_goes_on() -> None:
    judged = there(asked())
    waiting = after(judged, decided(judged), {"declined": 1})
    given_up = decided(waiting)
    assert given_up.record == record()
    (story,) = given_up.incidents
    assert (story.open, story.resume_step) == (False, None)
    told = decided(after(waiting, given_up))
    assert told.answers["1"].exit_code == SnapshotError.exit_code
    assert "step 8 is no longer kept; the training continues without the rewind" in told.answers["1"].sentence


LEFT = "0000000008-g1-5f0c91aa0000"


def test_an_order_comes_back_to_what_an_earlier_one_left() -> None:
    """By a restart, once all agents see that snapshot. Data that was left out since is used again, and no memory is."""
    begun = there(asked(left=LEFT))
    skipped = incident(1, 1, 1, window=Window(4, 40), remedy="skip", resume_step=Step(4), open=False, cause="ordered")
    begun = replace(begun, incidents=(skipped,))
    ordered = decided(begun)
    order = RewindOrder(number=2, to=Step(8), left=LEFT)
    assert ordered.record == replace(record(), rewind=order)
    assert [(i.rung, i.left, i.open) for i in ordered.incidents] == [(2, LEFT, True)]
    waiting = after(begun, ordered)
    assert decided(waiting) == Decision(), "not every agent sees it yet"
    seen = after(waiting, Decision(), {"left": LEFT})
    reopened = decided(seen)
    assert reopened.record
    assert (reopened.record.number, reopened.record.phase, reopened.record.rewind) == (2, Phase.GATHER, order)
    ready = replace(after(seen, reopened, {"generation": Generation(2)}), acks={A: ack(AckKind.READY, 2, port=1234)})
    launched = decided(ready)
    assert launched.record
    assert (launched.record.resume_step, launched.record.begins, launched.record.rewind) == (8, order, None)
    assert (launched.record.turns, launched.record.sources) == ((), {})
    told = gone_back(2, generation=Generation(2))
    done = after(ready, launched, {"left": "", "rewinds": (told,), "generation": Generation(2)})
    over = decided(done)
    assert over.answers["1"] == Answer(sentence="all ranks have restored step 8", step=Step(8))
    assert [turn.to for turn in turns(after(done, over).incidents)] == [8], (
        "the batches are not left out by a later restart"
    )


@pytest.mark.parametrize("when", ["it is never seen", "it proves damaged"])
def test_an_order_to_come_back_in_vain_is_told_and_the_training_goes_on(when: str) -> None:
    judged = there(asked(left=LEFT))
    waiting = after(judged, decided(judged))
    if when == "it is never seen":
        given_up = decide(waiting, NOW + 31, Policy())
        assert given_up.record == record()
        told = decided(after(waiting, given_up))
    else:
        seen = after(waiting, Decision(), {"left": LEFT})
        reopened = after(seen, decided(seen), {"generation": Generation(2), "left": ""})
        launched = decided(replace(reopened, acks={A: ack(AckKind.READY, 2, port=1234)}))
        assert launched.record
        assert (launched.record.resume_step, launched.record.begins) == (10, None)
        begun = after(reopened, launched)
        told = decided(after(begun, decided(begun)))
    assert told.answers["1"].exit_code == SnapshotError.exit_code
    why = "not all agents have seen the snapshot of step 8 within 30 s"
    why = why if when == "it is never seen" else "step 8 is no longer kept"
    assert f"{why}; the training continues without the rewind" in told.answers["1"].sentence


def test_where_the_ranks_die_first_the_next_ones_begin_there() -> None:
    judged = there(asked(skip=2))
    dying = after(judged, decided(judged), {"exits": (gone(started=True),)})
    reopened = decided(dying)
    assert reopened.record
    assert (reopened.record.number, reopened.record.rewind) == (2, RewindOrder(number=1, to=Step(8), skip=2))
    assert [(i.cause, i.rung) for i in reopened.incidents] == [("ordered", 2), ("rank_killed", 2)]
    gathered = {"generation": Generation(2), "exits": ()}
    ready = replace(after(dying, reopened, gathered), acks={A: ack(AckKind.READY, 2, port=1234)})
    launched = decided(ready)
    assert launched.record
    assert (launched.record.resume_step, launched.record.rewind) == (8, None)
    assert launched.record.begins == RewindOrder(number=1, to=Step(8), skip=2)
    begun = replace(
        after(ready, launched),
        status={
            A: status(
                2, **{**KEPT, "min_step": 8, "max_step": 8}, rewinds=(gone_back(generation=2, window=Window(8, 10)),)
            )
        },
    )
    told = decided(begun)
    assert told.answers["1"].exit_code == 0
    ordered = next(i for i in told.incidents if i.cause == "ordered")
    assert (ordered.open, ordered.lost_steps, ordered.window) == (False, 0, Window(8, 10))
    assert ordered.plan == "all ranks began at step 8, and skip batches 8 to 9"


def test_where_the_state_has_died_with_the_agent_the_newest_is_gone_on_from() -> None:
    judged = there(asked(step=Step(9)))
    dying = after(judged, decided(judged), {"exits": (gone(started=True),)})
    reopened = decided(dying)
    without = after(dying, reopened, {"memory_steps": (), "generation": Generation(2), "exits": ()})
    launched = decided(replace(without, acks={A: ack(AckKind.READY, 2, port=1234)}))
    assert launched.record
    assert (launched.record.resume_step, launched.record.begins) == (8, None)
    assert "step 9 is no longer kept" in launched.incidents[0].plan


def test_an_ordered_rewind_counts_against_no_budget() -> None:
    restarts = [incident(n, resume_step=Step(10)) for n in (1, 2, 3)]
    verdict = Verdict(cause="rank_killed", blamed=(), consequences=(), at_s=NOW)  # type: ignore[arg-type]
    assert plan(replace(verdict), 10, 10, restarts, RecoveryPolicy()).exit_code
    ordered = incident(4, rung=1, cause="ordered", resume_step=Step(4), remedy="replay", open=False)
    assert not plan(verdict, 10, 4, [*restarts, ordered], RecoveryPolicy()).exit_code
    assert not plan(verdict, 10, 4, [*restarts[:2], replace(ordered, rung=2)], RecoveryPolicy()).exit_code


# -- pause, resume, snapshot -----------------------------------------------------------------------------------------------


def test_a_pause_is_answered_when_all_ranks_wait() -> None:
    judged = there(asked(Wish.PAUSE))
    paused = decided(judged)
    assert paused.record == replace(record(), paused=True)
    waiting = after(judged, paused)
    assert decided(waiting) == Decision()
    told = decided(after(waiting, Decision(), {"paused": True}))
    assert told.answers["1"].exit_code == 0
    assert told.answers["1"].step == 10


def test_a_pause_survives_the_death_of_a_rank() -> None:
    dying = there(record=record(paused=True), said={"exits": (gone(started=True),)})
    reopened = decided(dying).record
    assert reopened
    assert reopened.paused


def test_to_go_on_overtakes_a_pause_that_is_not_complete() -> None:
    judged = there(asked(Wish.PAUSE), asked(Wish.RESUME, "2"), record=record(paused=True))
    overtaken = decided(judged)
    assert set(overtaken.answers) == {"1"}
    going = after(judged, overtaken)
    resumed = decided(going)
    assert resumed.record == record()
    on = after(going, resumed)
    assert set(decided(on).answers) == {"2"}
    assert decided(after(on, decided(on))) == Decision()


def test_going_on_where_nothing_is_paused_is_done_already() -> None:
    assert decided(there(asked(Wish.RESUME))).answers["1"].exit_code == 0


def test_a_snapshot_is_answered_when_it_is_on_disk() -> None:
    judged = there(asked(Wish.SNAPSHOT))
    ordered = decided(judged)
    assert ordered.record == replace(record(), snapshot="1")
    asked_for = after(judged, ordered)
    for said in ({}, {"snapshot": "1"}, {"snapshot": "1", "snapshot_step": Step(11)}, {"snapshot_step": Step(8)}):
        assert decided(after(asked_for, Decision(), said)) == Decision(), said
    for durable, step in (((8, 11), 11), ((11, 12), 11), ((8, 13, 14), 13)):  # of one that failed, a later one is tried
        there_now = {"snapshot": "1", "snapshot_step": Step(11), "durable_steps": durable}
        answers = decided(after(asked_for, Decision(), there_now)).answers
        assert answers == {"1": Answer(sentence=f"step {step} is on disk", step=Step(step))}


@pytest.mark.parametrize(
    ("begun", "unsaved", "late", "others", "sentence"),
    [
        (False, "it has a lambda", False, (), None),
        (True, "it has a lambda", False, (), "the state cannot be saved: it has a lambda"),
        (True, "", True, (), None),
        (True, "", False, (Wish.PAUSE,), None),
        (True, "", True, (Wish.PAUSE,), "it is not on disk after 600"),
    ],
    ids=["not tried yet", "unsavable", "slow", "a pause waits", "slow, and a pause waits"],
)
def test_a_snapshot_that_does_not_come_holds_up_no_other_order(
    begun: bool, unsaved: str, late: bool, others: tuple[Wish, ...], sentence: str | None
) -> None:
    at_s = NOW - (SAVE_S + 1 if late else 1)
    order = replace(asked(Wish.SNAPSHOT), at_s=at_s)
    judged = there(order, *(asked(kind, str(number)) for number, kind in enumerate(others, 2)))
    judged = replace(judged, record=replace(record(), snapshot="1"))
    said = {"snapshot": "1", "snapshot_step": Step(11) if begun else Step(-1), "unsaved": unsaved}
    found = decided(after(judged, Decision(), said)).answers.get("1")
    if sentence is None:
        assert found is None
    else:
        assert found
        assert sentence in found.sentence
        assert found.exit_code == MachineError.exit_code


def test_one_order_is_carried_out_after_the_other() -> None:
    judged = there(asked(), asked(Wish.SNAPSHOT, "2"))
    first = decided(judged)
    assert first.record
    assert first.record.rewind
    assert decided(after(judged, first)) == Decision()
    done = after(judged, first, {"rewinds": (gone_back(),)})
    answered = decided(done)
    assert set(answered.answers) == {"1"}
    second = decided(after(done, answered)).record
    assert second
    assert second.snapshot == "2"


# -- leaving, and the end ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [Phase.GATHER, Phase.LAUNCH, Phase.RUN])
def test_a_drain_ends_the_job_of_one_node_with_a_snapshot_and_in_order(phase: Phase) -> None:
    ending = decided(there(asked(), asked(Wish.DRAIN, "2", node="a"), record=record(phase, paused=True))).record
    assert ending
    assert (ending.phase, ending.last_snapshot, ending.exit_code) == (Phase.ENDING, True, 0)
    assert ending.reason == "node a is drained by alice"


def test_who_is_drained_and_cannot_be_done_without_is_named_as_such() -> None:
    two = {"record": record(members=("a", "b")), "spec": Spec(command=("torchrun",), sizes=(2,))}
    ending = decided(
        there(asked(Wish.DRAIN, node="a", instance="agent-a"), nodes={A: node("a"), B: node("b")}, **two)
    ).record
    assert ending
    assert ending.reason == "node a, which the job cannot do without, is drained by alice"


def test_a_drain_that_ends_the_job_names_who_could_have_gone_on() -> None:
    two = {"record": record(members=("a", "b")), "spec": Spec(command=("torchrun",), sizes=(2,))}
    c = NodeId("c")
    nodes, shut_out = {A: node("a"), B: node("b"), c: node("c")}, {c: Quarantine(reason="bad", until_s=NOW + 60)}
    ending = decided(
        there(asked(Wish.DRAIN, node="a", instance="agent-a"), nodes=nodes, quarantine=shut_out, **two)
    ).record
    assert ending
    assert ending.reason.endswith("is drained by alice; c could train in its place, once readmitted")


def test_a_drain_of_a_node_that_is_gone_and_waited_for_is_answered() -> None:
    two = {"record": record(members=("a", "b")), "spec": Spec(command=("torchrun",), sizes=(2,))}
    answer = rule(there(asked(Wish.DRAIN, node="b"), nodes={A: node("a")}, **two), NOW, Step(10)).answers["1"]
    assert (answer.exit_code, answer.sentence) == (3, "the agent of b is gone: there is nothing to drain")


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (asked(Wish.DRAIN, node="z"), "there is no node 'z' in this job; it runs on a. Nothing was done"),
        (asked("dance"), "this version knows no request 'dance'; nothing was done"),
    ],
)
def test_what_nobody_can_do_is_refused_and_holds_up_nothing(request_: Request, sentence: str) -> None:
    judged = there(request_, asked(ident="2"))
    refused = decided(judged)
    assert refused.record is None
    assert refused.answers == {"1": Answer(sentence=sentence, exit_code=UsageError.exit_code)}
    assert decided(after(judged, refused)).record


def test_a_preemption_names_the_time_that_all_of_it_may_take() -> None:
    preempted = asked(Wish.STOP, snapshot=True, budget_s=25.0, exit_code=143)
    ending = decided(there(preempted)).record
    assert ending
    assert (ending.leave_in_s, ending.last_snapshot, ending.exit_code) == (25.0, True, 143)


@pytest.mark.parametrize("phase", [Phase.ENDING, Phase.ENDED])
def test_a_job_that_ends_refuses_what_it_cannot_do_any_more(phase: Phase) -> None:
    judged = there(asked(), asked(Wish.STOP, "2"), record=record(phase, reason="stopped by SIGINT"))
    answers = decided(judged).answers
    assert answers["1"].exit_code == MachineError.exit_code
    assert ("2" in answers) is (phase is Phase.ENDED)


@pytest.mark.parametrize(
    ("ended", "here", "leave_in_s", "hurries"),
    [
        ((), "ab", 0.0, False),  # all are at it
        ((), "a", 0.0, True),
        ((), "a", 60.0, True),
        ((), "a", 1.0, False),
        (("b",), "a", 0.0, False),  # it was done before it left
    ],
)
def test_who_is_asked_to_end_does_not_wait_for_one_that_has_gone(
    ended: tuple[str, ...], here: str, leave_in_s: float, hurries: bool
) -> None:
    ends = record(Phase.ENDING, members=("a", "b"), exit_code=130, last_snapshot=True, leave_in_s=leave_in_s)
    nodes = {NodeId(name): node(name) for name in here}
    acks = {NodeId(name): ack(AckKind.ENDED if name in ended else AckKind.RUNNING, name=name) for name in "ab"}
    judged = world(record=ends, nodes=nodes, acks=acks)
    left_in_order = replace(judged, record=replace(ends, exit_code=0))
    through = replace(judged, record=replace(ends, exit_code=0, complete=True))
    for each in (judged, left_in_order, through):
        found = cut_short(each).record
        assert (found.leave_in_s if found else 0.0) == (HURRY_S if hurries and each is not through else 0.0)


# -- of several nodes --------------------------------------------------------------------------------------------------------


def test_a_drain_means_the_agent_that_was_there_and_not_the_next_one() -> None:
    """SIGTERM reached it, and all was killed before anybody answered; the same command has started another."""
    late = asked(Wish.DRAIN, node="a", instance="one-before")
    for judged in (there(late), there(late, spec=Spec(command=("torchrun",), sizes=(1,), spares=1))):
        assert leaving(judged, NOW) is None
        assert decided(judged).record is None
        answer = decided(judged).answers["1"]
        assert (answer.exit_code, "another agent runs there now" in answer.sentence) == (MachineError.exit_code, True)


def test_who_only_stands_by_or_has_left_need_not_hold_what_the_ranks_go_back_to() -> None:
    spare, gone_ = status(memory_steps=(3,), durable_steps=(2,)), status(durable_steps=(440,))
    judged = there(asked(), spec=Spec(command=("torchrun",), sizes=(1,), spares=1))
    told = {**judged.status, B: spare, NodeId("c"): gone_}
    assert decided(replace(judged, status=told)).incidents
    refused = decided(replace(there(asked(step=Step(440))), status=told)).answers["1"]
    assert "the nearest is 10" in refused.sentence


@pytest.mark.parametrize("budget_s", [0.0, 25.0], ids=["an operator", "a scheduler"])
def test_a_drain_of_the_node_that_runs_the_etcd_of_all_is_refused(budget_s: float) -> None:
    spec = Spec(command=("torchrun", "train.py"), sizes=(1,), spares=1)
    here = {A: replace(node("a"), hosts_etcd=True), B: node("b")}
    drain = asked(Wish.DRAIN, node="a", instance="agent-a", budget_s=budget_s)
    decision = decided(there(drain, spec=spec, nodes=here))
    if budget_s:
        assert decision.record
        assert decision.record.dismissed == ("agent-a",)
    else:
        assert decision.record is None
        assert "runs the etcd of all nodes" in decision.answers["1"].sentence
    ending = decided(there(drain, nodes={A: here[A]})).record
    assert ending
    assert ending.phase is Phase.ENDING, "a drain that ends the whole job needs no etcd afterwards"


def test_who_was_shut_out_until_now_can_take_the_place_of_one_that_is_drained() -> None:
    spec = Spec(command=("torchrun", "train.py"), sizes=(1,), spares=1)
    here = {A: node("a"), B: node("b")}
    over = {B: Quarantine(reason="3 faults have struck it", until_s=NOW - 1)}
    drained = there(asked(Wish.DRAIN, node="a", instance="agent-a"), spec=spec, nodes=here, quarantine=over)
    assert leaving(drained, NOW) is None
    assert leaving(drained, NOW - 2)


def both(*requests: Request, one: dict[str, Any], other: dict[str, Any], **changes: Any) -> World:
    """Nodes a and b, of which the other has said something else."""
    said = {n: status(**{**KEPT, "stepped_s": NOW - 50, "skips": True, **each}) for n, each in ((A, one), (B, other))}
    return world(**{"requests": requests, "status": said, "record": record(members=("a", "b")), **changes})


@pytest.mark.parametrize(
    ("wish", "present", "one", "other"),
    [
        (Wish.PAUSE, {"paused": True}, {"paused": True}, {"paused": False}),
        (Wish.RESUME, {}, {"paused": False}, {"paused": True}),
        (
            Wish.SNAPSHOT,
            {"snapshot": "1"},
            {"snapshot": "1", "snapshot_step": Step(8), "durable_steps": (8,)},
            {"snapshot": "1", "snapshot_step": Step(9), "durable_steps": (8,)},
        ),
    ],
)
def test_an_order_is_done_when_it_is_on_all_nodes(
    wish: Wish, present: dict[str, Any], one: dict[str, Any], other: dict[str, Any]
) -> None:
    now = record(members=("a", "b"), **present)
    for said in ((one, other), (other, one)):
        judged = both(asked(wish), one=said[0], other=said[1], record=now)
        assert rule(judged, NOW, Step(10)) == Decision()
    assert set(rule(both(asked(wish), one=one, other=one, record=now), NOW, Step(10)).answers) == {"1"}
    if wish is not Wish.RESUME:
        assert rule(there(asked(wish), record=now, status={}), NOW, Step(10)) == Decision(), "nobody has said anything"


def test_data_is_left_out_where_all_nodes_can() -> None:
    refused = rule(both(asked(skip=3), one={}, other={"skips": False}), NOW, Step(10))
    assert "this script cannot skip data" in refused.answers["1"].sentence
    assert rule(both(asked(skip=3), one={}, other={}), NOW, Step(10)).record


# -- readmission -----------------------------------------------------------------------------------------------------------

SHUT_OUT = {B: Quarantine(reason="3 faults have struck it", until_s=NOW + 60)}


def test_a_node_that_is_shut_out_may_train_again() -> None:
    judged = there(asked(Wish.READMIT, node="b"), quarantine=SHUT_OUT)
    decision = decided(judged)
    assert decision.record is None
    assert decision.quarantine == {B: Quarantine(reason="readmitted by alice", until_s=NOW, readmitted_s=NOW)}
    sentence = "node b may train again, and its earlier faults no longer count"
    assert decision.answers == {"1": Answer(sentence=sentence)}
    done = replace(after(judged, decision), quarantine=decision.quarantine)
    assert decided(done) == Decision()


@pytest.mark.parametrize(
    ("node_", "shut_out", "sentence"),
    [
        ("a", {}, "node a is not in quarantine; no node is. Nothing was done"),
        ("a", SHUT_OUT, "node a is not in quarantine; b is. Nothing was done"),
        ("z", {**SHUT_OUT, A: SHUT_OUT[B]}, "node z is not in quarantine; a and b are. Nothing was done"),
        ("b", {B: replace(SHUT_OUT[B], until_s=NOW)}, "node b is not in quarantine; no node is. Nothing was done"),
    ],
)
def test_only_a_quarantined_node_can_be_readmitted(
    node_: str, shut_out: dict[NodeId, Quarantine], sentence: str
) -> None:
    refused = decided(there(asked(Wish.READMIT, node=node_), quarantine=shut_out))
    assert refused == Decision(answers={"1": Answer(sentence=sentence, exit_code=UsageError.exit_code)})


def test_a_readmission_waits_for_no_other_order() -> None:
    judged = there(asked(), asked(Wish.RESUME, "2"), asked(Wish.READMIT, "3", node="b"), quarantine=SHUT_OUT)
    assert set(decided(judged).answers) == {"3"}
    ending = replace(judged, record=record(Phase.ENDING))
    assert decided(ending).answers["3"].exit_code == MachineError.exit_code


# -- what else an order may meet with ----------------------------------------------------------------------------------------


def test_an_order_between_two_lives_is_no_rewind_in_place() -> None:
    gathering = there(asked(), record=record(Phase.GATHER))
    (opened,) = rule(gathering, NOW, Step(10)).incidents
    assert (opened.rung, opened.plan) == (2, "the next ranks begin at step 8")


def test_a_second_rewind_waits_for_the_first_and_for_what_the_replicas_have_shown() -> None:
    first = there(asked())
    waiting = after(first, decided(first))
    assert rule(replace(waiting, requests=(asked(ident="2"),)), NOW, Step(10)) == Decision()
    found = incident(7, rung=1, cause="fingerprint_mismatch", onset=Step(9))
    turning = record(rewind=RewindOrder(number=7, to=Step(8), cause=OrderedBy.COMPARISON))
    judged = there(asked(), record=turning, incidents=(found,))
    assert rule(judged, NOW, Step(10)) == Decision()
    done = replace(judged, incidents=(replace(found, remedy="replay"),))
    assert rule(done, NOW, Step(10)).record, "the ranks have gone back, and only its end is waited for"
    declined = replace(judged, requests=(), status={A: status(declined=7)})
    assert rule(declined, NOW, Step(10)) == Decision(), "the worker group is started again for it (`unheeded`)"


def test_only_the_present_order_is_given_up() -> None:
    judged = there(asked())
    waiting = after(judged, decided(judged), {"declined": 5})
    assert rule(waiting, NOW, Step(10)) == Decision()


def test_to_go_on_overtakes_a_pause_that_was_not_begun_and_none_that_was_asked_for_later() -> None:
    judged = there(asked(Wish.PAUSE), asked(Wish.RESUME, "2"), asked(Wish.PAUSE, "3"))
    assert set(rule(judged, NOW, Step(10)).answers) == {"1"}
    after = replace(judged, answers={"1": Answer(sentence="")})
    assert set(rule(after, NOW, Step(10)).answers) == {"2"}


def test_a_node_that_has_left_meanwhile_is_drained() -> None:
    """It was there when the order was given."""
    late = asked(Wish.DRAIN, node="b", instance="agent-b")
    spec = Spec(command=("torchrun", "train.py"), sizes=(1, 2))
    judged = there(late, spec=spec)
    assert rule(judged, NOW, Step(10)).answers["1"].exit_code == 0
    alone = there(late)
    assert leaving(alone, NOW) == late, "a job of one node has no other to go on on"
    assert leaving(judged, NOW) is None


@pytest.mark.parametrize(
    ("kind", "others", "first"),
    [
        (Wish.REWIND, (Wish.SNAPSHOT,), "1"),
        (Wish.PAUSE, (Wish.STOP, Wish.REWIND), "2"),
        (Wish.REWIND, (Wish.DRAIN, Wish.READMIT), None),
        (Wish.RESUME, (Wish.SNAPSHOT,), None),
        (Wish.STOP, (Wish.SNAPSHOT,), None),
        (Wish.REWIND, (), None),
    ],
)
def test_which_order_comes_before(kind: Wish, others: tuple[Wish, ...], first: str | None) -> None:
    waits = [asked(other, str(number)) for number, other in enumerate(others, 1)]
    last = asked(kind, "9")
    found = earlier(last, there(*waits, last, asked(Wish.SNAPSHOT, "99")))
    assert (found.id if found else None) == first
