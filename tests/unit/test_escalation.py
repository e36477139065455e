"""Verdict → plan: when the worker group restarts, and when the job stops."""

from dataclasses import replace
from typing import Any

import pytest

from mt_resilient.resilience.detect.registry import Suspicion, hung_ranks
from mt_resilient.resilience.diagnose.root_cause import Verdict
from mt_resilient.resilience.errors import (
    BudgetSpent,
    MachineError,
    ScriptError,
    SilentCorruption,
    SnapshotError,
    UsageError,
)
from mt_resilient.resilience.model.cause import Cause, Kind
from mt_resilient.resilience.model.incident import Incident
from mt_resilient.resilience.model.rewind import AGAIN, Origin, Remedy
from mt_resilient.resilience.model.signals import OWN_WORK, DeviceState
from mt_resilient.resilience.model.state_machine import Event
from mt_resilient.resilience.model.types import NodeId, Rank, Step
from mt_resilient.resilience.plan.escalation import REWIND_IN_PLACE, STOP, RecoveryPolicy, may_resume, plan
from mt_resilient.resilience.plan.restart_history import Size, bound, skipped_to, unreadable
from mt_resilient.resilience.plan.resume_point import ResumePoint

from .stalls import stall
from .worlds import A, B, incident, status, world

POLICY = RecoveryPolicy()
IMPORT = "script_raised:1:ModuleNotFoundError"


def verdict(cause: Cause, started: bool = True, signature: str = "rank_killed:-9:") -> Verdict:
    blamed = Suspicion(
        cause=cause, node=NodeId("a"), at_s=1.0, evidence="something", signature=signature, started=started
    )
    return Verdict(cause=cause, blamed=(blamed,), consequences=(), at_s=1.0)


def killed(*resumed: int, at: int = 200, every_s: float = 10.0) -> list[Incident]:
    """One kill after the other, after each of which the job went on from a state of `resumed`; the next one is at 1 s."""
    begun = 1.0 - every_s * len(resumed)
    return [
        incident(number, at=at, resume_step=step, at_s=begun + every_s * (number - 1))
        for number, step in enumerate(resumed, 1)
    ]


def failed_at_start(*signatures: str) -> list[Incident]:
    return [incident(number, at=-1, started=False, signature=each) for number, each in enumerate(signatures, 1)]


HOPELESS = (Cause.STATE_REFUSED, Cause.STATE_UNSAVABLE, Cause.TORCH_MISSING)
"""Before the first step: no other start would help."""


@pytest.mark.parametrize("cause", [cause for cause in Cause if cause not in (*Kind, Cause.FROZEN, *HOPELESS)])
@pytest.mark.parametrize("started", [True, False])
def test_a_first_fault_restarts_the_worker_group(cause: Cause, started: bool) -> None:
    answer = plan(verdict(cause, started), 10, 10, [], POLICY)
    assert (answer.event, answer.rung, answer.exit_code) == (Event.FAULT, 2, 0)


@pytest.mark.parametrize(
    ("cause", "started", "trained", "code"),
    [
        (Cause.STATE_REFUSED, False, 0, 2),
        (Cause.STATE_REFUSED, False, 1, 2),
        (Cause.STATE_REFUSED, False, 2, 0),  # on this number of nodes, and it has trained on another
        (Cause.STATE_REFUSED, True, 1, 0),
        (Cause.STATE_UNSAVABLE, False, 0, 2),
        (Cause.STATE_UNSAVABLE, False, 1, 2),
        (Cause.TORCH_MISSING, False, 0, 3),
        (Cause.TORCH_MISSING, False, 1, 0),  # a file system is away, it may be
    ],
)
def test_what_no_other_start_helps_against_stops_the_job_at_once(
    cause: Cause, started: bool, trained: int, code: int
) -> None:
    answer = plan(verdict(cause, started), 10, 10, [], POLICY, size=Size(trained=trained))
    assert (answer.event, answer.exit_code) == (Event.GIVE_UP if code else Event.FAULT, code)
    assert answer.unfit == (1 if trained == 2 else 0)


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.NON_FINITE])
def test_what_the_ranks_cannot_cure_stops_the_job_at_once(kind: Kind) -> None:
    answer = plan(verdict(Cause(kind)), 10, 10, [], POLICY)
    assert (answer.event, answer.rung, answer.exit_code) == (Event.GIVE_UP, STOP, BudgetSpent.exit_code)


@pytest.mark.parametrize(
    ("kept", "restarted_at", "event"),
    [
        (10, (), Event.FAULT),
        (-1, (), Event.GIVE_UP),  # new processes would do exactly the same
        (10, (10,), Event.GIVE_UP),
        (300, (10,), Event.FAULT),
        (200, (10,), Event.GIVE_UP),
    ],
)
def test_a_nan_that_no_rewind_cures_gets_new_processes_once(
    kept: int, restarted_at: tuple[int, ...], event: Event
) -> None:
    past = [incident(n, cause=Cause.NON_FINITE, at=at, resume_step=at) for n, at in enumerate(restarted_at, 1)]
    assert plan(verdict(Cause.NON_FINITE), kept, kept, past, POLICY).event is event


@pytest.mark.parametrize(
    ("resumed", "kept", "goes_on"),
    [
        ((), 10, True),
        ((10,), 10, True),
        ((10, 10), 10, True),
        ((10, 10, 10), 10, False),
        ((10, 10, 10), 9, False),
        ((10, 10, 10), 11, True),
        ((10, 9, 8), 7, False),
        ((10, 10, 11, 11), 11, True),
        ((10, 10, 10, 11, 11, 11), 11, False),
        ((10, 11, 12, 13), 14, True),
        ((10, 11, 12, 13), 13, True),
        ((-1, -1), -1, True),
        ((-1, -1, -1), -1, False),
        ((-1, -1, -1), 1, True),
        ((99, 50, 60, 70), 80, True),  # the agent died once, and memory with it: each life since has brought something
    ],
)
def test_restarts_without_progress_are_counted(resumed: tuple[int, ...], kept: int, goes_on: bool) -> None:
    answer = plan(verdict(Cause.RANK_KILLED), 200, kept, killed(*resumed), POLICY)
    assert (answer.event is Event.FAULT) is goes_on
    if not goes_on:
        assert (answer.event, answer.rung, answer.exit_code) == (Event.GIVE_UP, STOP, 93)
        what = f"did not get beyond the snapshot of step {kept}" if kept >= 0 else "brought no snapshot"
        assert answer.reason == f"3 restarts in a row {what}: 3 × rank killed"


def earlier(origin: str, *onsets: int, ranks: tuple[Rank, ...] = (), remedy: Remedy = Remedy.SKIP) -> list[Incident]:
    return [
        incident(at, rung=1, cause=Kind.NON_FINITE, onset=Step(at), origin=origin, ranks=ranks, remedy=remedy)
        for at in onsets
    ]


@pytest.mark.parametrize(
    ("past", "sentence"),
    [
        ([], "Check the model and its settings"),
        (earlier(AGAIN, 230), "Check the model and its settings"),
        (earlier(AGAIN, 230, remedy=Remedy.REWIND), "Check the model, its settings and its data"),
        (
            [*earlier(Origin.DATA, 7, 79, 185, ranks=(Rank(1),)), *earlier(AGAIN, 230)],
            "Check the model, its settings and its data. Earlier faults: at steps 7, 79 and 185 it recurred with the data, and not "
            "without it: the data of rank 1",
        ),
        (
            [*earlier(Origin.RESCUED, 7), *earlier(AGAIN, 230)],
            "Check the model, its settings and its data. Earlier faults: at step 7 it did not recur after a wider skip",
        ),
        (
            [*earlier(Origin.UNDECIDED, 7), *earlier(AGAIN, 230)],
            "Check the model, its settings and its data. Earlier faults: at step 7 it did not recur, but the data may have been other",
        ),
        (
            [*earlier(Origin.TRANSIENT, 7), *earlier(AGAIN, 230)],
            "Check the model, its settings and the hardware. Earlier faults: at step 7 it did not recur when the same data was replayed",
        ),
        (
            [*earlier(Origin.STATE, 7), *earlier(Origin.DATA, 50), *earlier(AGAIN, 230)],
            "Check the model, its settings, its data and the hardware. Earlier faults: at step 7 it did not recur from an older state",
        ),
    ],
)
def test_the_end_names_what_was_concluded_before_and_does_not_contradict_it(
    past: list[Incident], sentence: str
) -> None:
    reason = plan(verdict(Cause(Kind.NON_FINITE)), 231, -1, past, POLICY).reason
    assert reason.startswith(f"the ranks have tried every remedy. {sentence}")


def test_the_end_names_the_causes_of_the_restarts() -> None:
    past = killed(10, 10, 10)
    past[1] = replace(past[1], cause=Cause.RANK_HUNG)
    answer = plan(verdict(Cause.SCRIPT_RAISED), 200, 10, past, POLICY)
    assert answer.reason.endswith("the snapshot of step 10: 1 × script raised, 1 × rank killed, 1 × rank hung")


def test_only_lives_that_ended_in_a_fault_are_counted() -> None:
    past = killed(10, 10, 10)
    moved = replace(past[1], cause=Cause.MOVED)
    assert plan(verdict(Cause.RANK_KILLED), 200, 10, [past[0], moved, past[2]], POLICY).event is Event.FAULT


@pytest.mark.parametrize("unread", [Cause.SNAPSHOT_UNUSABLE, Cause.SNAPSHOT_UNREADABLE])
def test_a_life_that_could_not_begin_is_none(unread: Cause) -> None:
    """It was to begin with step 20, which is not asked for again: with 15, the next one has begun with more than the one before."""
    policy = RecoveryPolicy(max_without_progress=2)
    past = killed(10, 20, 15)
    assert plan(verdict(Cause.RANK_KILLED), 200, 15, past, policy).exit_code == 93
    past[2] = replace(past[2], cause=unread)
    assert plan(verdict(Cause.RANK_KILLED), 200, 15, past, policy).event is Event.FAULT


@pytest.mark.parametrize("at", [0, 2])
def test_budgets_begin_anew_with_the_last_rewind_that_was_ordered(at: int) -> None:
    past = [*killed(10, 10, 10), *killed(10, 10)]
    ordered = incident(9, rung=1, cause=Cause.ORDERED)
    for before, code in (
        ([*past[:at], ordered, *past[at:3], ordered, *past[3:]], 0),
        ([*past[:at], ordered, *past[at:]], 93),
    ):
        assert plan(verdict(Cause.RANK_KILLED), 200, 10, before, POLICY).exit_code == code


def test_a_worker_group_that_was_never_launched_has_no_life() -> None:
    past = killed(10, 10, 10)
    past[1] = replace(past[1], resume_step=None)
    assert plan(verdict(Cause.RANK_KILLED), 200, 10, past, POLICY).event is Event.FAULT


@pytest.mark.parametrize(
    ("lived_s", "at", "reached", "goes_on"),
    [(599.0, -1, -1, False), (600.0, -1, -1, True), (600.0, 5, -1, False), (600.0, -1, 5, False)],
)
def test_a_script_that_tells_no_steps_has_lived_long_enough(
    lived_s: float, at: int, reached: int, goes_on: bool
) -> None:
    past = killed(-1, -1, -1, at=at, every_s=lived_s)
    assert (plan(verdict(Cause.RANK_KILLED), reached, -1, past, POLICY).event is Event.FAULT) is goes_on


@pytest.mark.parametrize(("resumed", "goes_on"), [((), True), ((10,), True), ((-1, 10), True), ((-1,), False)])
def test_a_damaged_snapshot_of_another_job_is_not_tried_for_ever(resumed: tuple[int, ...], goes_on: bool) -> None:
    """Nobody can set it aside: a life that began with no step of its own, and yet could not restore, was to begin with that one."""
    answer = plan(verdict(Cause.SNAPSHOT_UNUSABLE, started=False), -1, -1, killed(*resumed), POLICY)
    assert (answer.event is Event.FAULT) is goes_on
    if not goes_on:
        assert (answer.event, answer.exit_code) == (Event.GIVE_UP, SnapshotError.exit_code)
        assert "--start-from" in answer.reason
    later = replace(killed(10)[0], cause=Cause.MOVED)
    after = plan(verdict(Cause.SNAPSHOT_UNUSABLE, started=False), 10, 10, [*killed(*resumed), later], POLICY)
    assert after.event is Event.FAULT, "nodes have changed since, and it began with a step of its own"
    rewound = plan(verdict(Cause.SNAPSHOT_UNUSABLE, started=True), 50, 50, killed(*resumed), POLICY)
    assert rewound.event is Event.FAULT, "a copy in memory that a rewind in place has found damaged"


@pytest.mark.parametrize("budget", [1, 2, 5])
def test_the_budget_is_what_the_policy_says(budget: int) -> None:
    policy = RecoveryPolicy(max_without_progress=budget)
    assert plan(verdict(Cause.RANK_KILLED), 10, 10, killed(*[10] * (budget - 1)), policy).event is Event.FAULT
    stop = plan(verdict(Cause.RANK_KILLED), 10, 10, killed(*[10] * budget), policy)
    assert stop.event is Event.GIVE_UP
    assert f"{budget} restart" in stop.reason


@pytest.mark.parametrize(
    ("step", "said", "unread", "code"),
    [
        (-1, {}, False, None),
        (5, {}, False, None),
        (5, {"rejected_steps": (9,), "storage": False}, True, None),
        (-1, {"rejected_steps": (9,)}, False, SnapshotError.exit_code),
        (-1, {"storage": False}, False, MachineError.exit_code),
        (-1, {"rejected_steps": (9,)}, True, MachineError.exit_code),
    ],
)
def test_the_training_does_not_begin_anew_where_snapshots_were_kept(
    step: int, said: dict[str, Any], unread: bool, code: int | None
) -> None:
    answer = may_resume(ResumePoint(step=Step(step), reason=""), [status(), status(**said)], unread)
    assert (answer and (answer.event, answer.exit_code)) == (code and (Event.GIVE_UP, code))


@pytest.mark.parametrize(
    ("steps", "avoided"), [((), set()), ((9,), set()), ((9, 9), {9}), ((9, 5, 9, 5), {9, 5}), ((9, 5), set())]
)
def test_what_storage_has_refused_twice_is_not_asked_for_again(steps: tuple[int, ...], avoided: set[int]) -> None:
    past = [incident(n, at=step, cause=Cause.SNAPSHOT_UNREADABLE) for n, step in enumerate(steps, 1)]
    assert unreadable([*past, incident(7, at=4), incident(8, at=4)]) == avoided


def test_rewinds_in_place_are_no_restarts() -> None:
    rewinds = [incident(number, rung=REWIND_IN_PLACE, at=10) for number in range(1, 9)]
    assert plan(verdict(Cause.RANK_KILLED), 10, 10, rewinds, POLICY).event is Event.FAULT


@pytest.mark.parametrize(
    ("past", "cause", "started", "goes_on"),
    [
        ((), Cause.SCRIPT_RAISED, False, True),
        ((IMPORT,), Cause.SCRIPT_RAISED, False, False),
        ((IMPORT,), Cause.SCRIPT_RAISED, True, True),
        ((IMPORT,), Cause.RANK_KILLED, False, True),
        (("script_raised:1:OSError",), Cause.SCRIPT_RAISED, False, True),
        ((IMPORT, "rank_killed:-9:"), Cause.SCRIPT_RAISED, False, True),
        (("rank_killed:-9:", IMPORT), Cause.SCRIPT_RAISED, False, False),
    ],
)
def test_the_same_failure_before_the_first_step_is_the_script_s_own(
    past: tuple[str, ...], cause: Cause, started: bool, goes_on: bool
) -> None:
    answer = plan(verdict(cause, started, IMPORT), -1, -1, failed_at_start(*past), POLICY)
    assert (answer.event is Event.FAULT) is goes_on
    if not goes_on:
        assert (answer.event, answer.rung, answer.exit_code) == (Event.GIVE_UP, STOP, ScriptError.exit_code)
        assert "failed 2 times in the same way" in answer.reason


@pytest.mark.parametrize(
    ("past", "code"),
    [
        ([], 0),
        ([{"signature": "rank_killed:-9:"}], 0),
        ([{"signature": IMPORT}], ScriptError.exit_code),
        (
            [{"signature": IMPORT}, {"signature": "no loss", "loop_skipped": True, "resume_step": 50}],
            ScriptError.exit_code,
        ),
        ([{"signature": IMPORT, "loop_skipped": True}], ScriptError.exit_code),
        ([{"signature": IMPORT, "loop_skipped": True, "resume_step": 50}], 0),
        ([{"signature": IMPORT, "at": 50}], 0),
    ],
)
def test_the_same_failure_behind_the_last_step_is_the_script_s_own(past: list[dict[str, Any]], code: int) -> None:
    """But for what only the loop's body makes, where a life began at the last step and the next one before it."""
    before = [incident(n, **{"at": 60, "resume_step": 60, **given}) for n, given in enumerate(past, 1)]
    (blamed,) = verdict(Cause.SCRIPT_RAISED, True, IMPORT).blamed
    seen = Verdict(cause=Cause.SCRIPT_RAISED, blamed=(replace(blamed, through=True),), consequences=(), at_s=1.0)
    assert plan(seen, 60, 60, before, POLICY, size=Size(trained=1)).exit_code == code


def test_whoever_failed_behind_a_loop_that_did_not_run_begins_earlier() -> None:
    failed = incident(1, at=60, loop_skipped=True)
    assert skipped_to([failed]) == 60
    assert skipped_to([replace(failed, resume_step=Step(50))]) == -1
    assert skipped_to([incident(1, at=60)]) == -1


def test_lives_that_end_behind_the_last_step_bring_nothing_newer() -> None:
    """However far before it they begin."""
    before = [incident(n, at=60, resume_step=50, loop_skipped=True, signature=str(n)) for n in (1, 2, 3)]
    answer = plan(verdict(Cause.RANK_KILLED), 60, 60, before, POLICY, size=Size(trained=1))
    assert answer.exit_code == BudgetSpent.exit_code


@pytest.mark.parametrize(
    "past",
    [
        incident(
            1, at=-1, started=False, signature=IMPORT, at_s=1.0 - POLICY.unwatched_progress_s
        ),  # after a long life
        incident(1, at=10, started=True, signature=IMPORT),  # after steps
    ],
)
def test_the_same_failure_after_a_life_that_got_somewhere_is_another_one(past: Incident) -> None:
    answer = plan(verdict(Cause.SCRIPT_RAISED, False, IMPORT), past.step_at_fault, past.step_at_fault, [past], POLICY)
    assert answer.event is Event.FAULT


def test_what_failed_on_nodes_that_are_shut_out_is_not_the_script_s_own() -> None:
    again, nowhere = verdict(Cause.SCRIPT_RAISED, False, IMPORT), failed_at_start(IMPORT)
    past = [replace(i, nodes=(B,)) for i in nowhere]
    for before, shut_out, event in (
        (past, {A, B}, Event.FAULT),
        (past, {A}, Event.GIVE_UP),
        (past, set[NodeId](), Event.GIVE_UP),
        (nowhere, {A, B}, Event.GIVE_UP),
    ):
        assert plan(again, 8, 8, before, POLICY, shut_out=shut_out).event is event


@pytest.mark.parametrize(("shut_out", "lives"), [((), 3), (("a",), 4), (("a", "b"), 6), (("b",), 4)])
def test_lives_that_were_ended_on_nodes_that_are_shut_out_count_half(shut_out: tuple[str, ...], lives: int) -> None:
    """Every second life ends on b, the present one on a, and nothing newer was kept."""
    for number in range(1, 8):
        past = [replace(i, nodes=((A, B)[(number - at) % 2],)) for at, i in enumerate(killed(*[8] * number))]
        answer = plan(verdict(Cause.RANK_KILLED), 9, 8, past, POLICY, shut_out={NodeId(n) for n in shut_out})
        assert (answer.event is Event.FAULT) is (number < lives), number


@pytest.mark.parametrize(("most", "starts"), [(7, 5), (5, 5), (4, 4), (1, 1)])
@pytest.mark.parametrize(("size", "trained"), [(3, 4), (4, 3)])
def test_a_number_of_nodes_on_which_the_script_does_not_start_is_left(
    size: int, trained: int, most: int, starts: int
) -> None:
    """In whatever way it fails there; on another number all counts anew."""
    policy, past = RecoveryPolicy(failed_starts=most), killed(8, at=8)
    found = [verdict(cause, False, IMPORT) for cause in (Cause.SCRIPT_RAISED, Cause.RANK_KILLED, Cause.RANK_HUNG)]
    for number in range(1, starts + 1):
        answer = plan(found[number % 3], 8, 8, past, policy, size=Size(size, trained))
        assert (answer.event, answer.unfit) == (Event.FAULT, size if number == starts else 0)
        early = replace(past[0], started=False, cause=found[number % 3].cause, size=size)
        past.append(replace(early, pause_s=answer.pause_s, unfit=answer.unfit))
    after = plan(found[0], 8, 8, past, RecoveryPolicy(), size=Size(size, trained))
    assert (after.event, after.unfit, after.pause_s) == (Event.FAULT, 0, 0)
    struck = verdict(Cause.RANK_KILLED)
    assert plan(struck, 9, 8, killed(8, 8, 8, 8), POLICY, size=Size(size, trained)).event is Event.GIVE_UP
    lost = plan(verdict(Cause.AGENT_LOST, False), 8, 8, killed(8, 8, 8, 8), POLICY, size=Size(size, trained))
    assert (lost.event, lost.unfit) == (Event.FAULT, size)


@pytest.mark.parametrize("starts", [0, 1, 4, 50])
@pytest.mark.parametrize("cause", [Cause.SCRIPT_RAISED, Cause.RANK_HUNG, Cause.RANK_KILLED])
def test_a_number_of_nodes_that_was_left_is_tried_now_and_then_where_no_other_can_be_had(
    cause: Cause, starts: int
) -> None:
    found, early = verdict(cause, False, IMPORT), failed_at_start(IMPORT)[0]
    past = [replace(early, cause=cause, size=3, pause_s=300.0, step_at_fault=Step(8))] * starts
    answer = plan(found, 8, 8, past, POLICY, size=Size(3, 4, left=True))
    assert (answer.event, answer.unfit, answer.pause_s) == (Event.FAULT, 3, 300)
    assert "on every other available number" in answer.reason


@pytest.mark.parametrize("cause", [Cause.SCRIPT_RAISED, Cause.RANK_HUNG, Cause.RANK_KILLED])
def test_where_a_job_has_trained_starts_that_fail_wait_longer_and_longer(cause: Cause) -> None:
    """In whatever way they fail; other lives without progress count by themselves, before and after."""
    found = verdict(cause, False, IMPORT)
    past, pauses = killed(8, 8, at=8), []
    while (answer := plan(found, 8, 8, past, POLICY, size=Size(trained=1))).event is Event.FAULT:
        assert "starts in a row have failed" in answer.reason or not answer.pause_s
        pauses.append(answer.pause_s)
        early = replace(past[0], started=False, cause=cause, signature=f"{len(past)}", pause_s=answer.pause_s, size=1)
        past.append(early)
    assert pauses == [0, 1, 5, 25, 125, 300]
    assert (answer.rung, answer.exit_code, answer.pause_s) == (STOP, BudgetSpent.exit_code, 0)
    assert "7 starts in a row have failed before the first step" in answer.reason
    for most in (1, 2, 3):
        few = RecoveryPolicy(failed_starts=most)
        ends = [plan(found, 8, 8, past[: 2 + n], few, size=Size(trained=1)).event for n in range(most)]
        assert ends == [*[Event.FAULT] * (most - 1), Event.GIVE_UP]
    endless = RecoveryPolicy(failed_starts=10_000)
    assert plan(found, 8, 8, past[:1] + past[1:] * 999, endless, size=Size(trained=1)).pause_s == 300
    struck = verdict(Cause.RANK_KILLED)
    assert plan(struck, 9, 9, past, POLICY, size=Size(trained=1)).event is Event.FAULT
    assert plan(struck, 9, 8, past[:1] + past[2:], POLICY, size=Size(trained=1)).event is Event.FAULT
    assert plan(struck, 9, 8, past, POLICY, size=Size(trained=1)).event is Event.FAULT
    assert plan(struck, 9, 8, [past[0], *past], POLICY, size=Size(trained=1)).exit_code == BudgetSpent.exit_code


@pytest.mark.parametrize(
    ("between", "pause_s"),
    [
        ({}, 5),
        ({"cause": Cause.AGENT_LOST}, 1),  # of what ended before the ranks did, nobody knows how they would have
        ({"cause": Cause.AGENT_LOST, "pause_s": 1.0}, 5),  # they had ended before it did
        ({"cause": Cause.AGENT_RESTARTED, "step_at_fault": Step(-1)}, 1),  # while it gathers, nobody tells of steps
        ({"nodes": (B,)}, 5),  # which is shut out, and it fails elsewhere too
        ({"size": 2}, 1),
        ({"started": True}, 0),
        ({"cause": Cause.MOVED, "started": True}, 0),
        ({"step_at_fault": Step(7)}, 0),  # step 8 was made since
    ],
)
def test_only_starts_in_a_row_make_others_wait(between: dict[str, Any], pause_s: float) -> None:
    first, second = failed_at_start(IMPORT, IMPORT)
    here: dict[str, Any] = {"step_at_fault": Step(8), "size": 1}
    past = [replace(first, **here), replace(second, **{**here, **between})]
    found = verdict(Cause.SCRIPT_RAISED, False, IMPORT)
    assert plan(found, 8, 8, past, POLICY, size=Size(trained=1), shut_out={B}).pause_s == pause_s


def test_each_of_several_failures_is_counted_from_the_one_before() -> None:
    """Not from the last one: all of them together took longer than a life is long."""
    past = [incident(n, at=-1, started=False, signature=IMPORT, at_s=1.0 - 1500.0 + 500.0 * n) for n in (1, 2)]
    policy = RecoveryPolicy(same_failure_at_start=3)
    assert plan(verdict(Cause.SCRIPT_RAISED, False, IMPORT), -1, -1, past, policy).exit_code == 5


@pytest.mark.parametrize("name", ["max_without_progress", "same_failure_at_start", "failed_starts", "max_mismatches"])
def test_a_policy_without_any_try_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=rf"recovery\.{name} is 0"):
        RecoveryPolicy(**{name: 0})


HANG = "rank_hung:exchange:train.py line 3"


def test_a_hang_before_the_first_step_twice_in_the_same_way_is_the_script_s() -> None:
    hung = verdict(Cause.RANK_HUNG, started=False, signature=HANG)
    patient = [replace(each, at_s=1.0 - 3000.0) for each in failed_at_start(HANG)]  # as long as a start may take
    for past, event in (([], Event.FAULT), (patient, Event.GIVE_UP), (failed_at_start("another"), Event.FAULT)):
        assert plan(hung, -1, -1, past, POLICY).event is event
    assert plan(hung, -1, -1, patient, POLICY).exit_code == ScriptError.exit_code
    assert "hung 2 times" in plan(hung, -1, -1, patient, POLICY).reason


def test_hangs_in_the_middle_count_as_restarts_without_progress() -> None:
    hung = verdict(Cause.RANK_HUNG, signature=HANG)
    assert plan(hung, 200, 10, killed(10, 10), POLICY).event is Event.FAULT
    assert plan(hung, 200, 10, killed(10, 10, 10), POLICY).exit_code == BudgetSpent.exit_code


OWN, DEVICE = "rank_hung:elsewhere:train.py line 3", "rank_hung:device:train.py line 3"


@pytest.mark.parametrize(
    ("signature", "before", "times", "reached", "event"),
    [
        (OWN, OWN, 1, 200, Event.GIVE_UP),
        (OWN, OWN, 1, 201, Event.FAULT),  # the job has come further
        (OWN, "rank_hung:elsewhere:train.py line 4", 1, 200, Event.FAULT),
        (HANG, HANG, 2, 200, Event.FAULT),  # the network may be back: the agents do not wait longer there
        (HANG, HANG, 3, 200, Event.GIVE_UP),
        (DEVICE, DEVICE, 2, 200, Event.FAULT),
        (DEVICE, DEVICE, 3, 200, Event.GIVE_UP),
    ],
)
def test_a_hang_after_the_same_step_at_the_same_place_is_no_progress(
    signature: str, before: str, times: int, reached: int, event: Event
) -> None:
    """Whatever snapshots lie in between. The script's own work is taken for a hang once: the second time, the agent waits longer."""
    hung = verdict(Cause.RANK_HUNG, signature=signature)
    hung = replace(hung, blamed=(replace(hung.blamed[0], advice="Raise this", rank=Rank(0)),))
    said = {"signature": before, "nodes": (NodeId("a"),), "summary": "rank 0 hangs, silent for 660 s"}
    past = [replace(each, **said) for each in killed(*range(10, 10 + times))]
    answer = plan(hung, reached, 190, past, POLICY)
    assert answer.event is event
    assert answer.reason.endswith("Raise this")
    if event is Event.GIVE_UP:
        assert answer.exit_code == BudgetSpent.exit_code
        assert f"as in incident {times} (rank 0 hangs, silent for 660 s)" in answer.reason


@pytest.mark.parametrize(
    ("alive", "out", "times", "event"),
    [
        (1, (), 1, Event.GIVE_UP),
        (2, (), 1, Event.FAULT),  # the next restart may be on another node
        (2, (), 2, Event.FAULT),
        (2, (), 3, Event.GIVE_UP),
        (2, ("a",), 3, Event.FAULT),  # in quarantine
    ],
)
def test_the_same_hang_does_not_end_a_job_that_another_node_may_save(
    alive: int, out: tuple[str, ...], times: int, event: Event
) -> None:
    said = {"signature": OWN, "nodes": (NodeId("a"),)}
    hung = verdict(Cause.RANK_HUNG, signature=OWN)
    hung = replace(hung, blamed=(replace(hung.blamed[0], rank=Rank(0)),))
    past = [replace(each, **said) for each in killed(*range(10, 10 + times))]
    shut_out = frozenset(map(NodeId, out))
    answer = plan(hung, 200, 190, past, POLICY, shut_out=shut_out, size=Size(alive=alive))
    assert answer.event is event


def test_a_stuck_device_is_not_the_script_s_own_work() -> None:
    """The agents do not wait longer there the second time."""
    for device, own in ((DeviceState.UNKNOWN, True), (DeviceState.STUCK, False)):
        (found,) = hung_ranks(world(status={A: status(stalls=(stall(device=device, site="train.py line 3"),))}))
        assert any(f":{place}:" in found.signature for place in OWN_WORK) is own


HOUR = 3600.0


@pytest.mark.parametrize(
    ("hours_ago", "goes_on"),
    [
        ((), True),
        ((1,), True),
        ((2, 1), False),
        ((24, 1), False),
        ((30, 1), True),
        ((30, 2, 1), False),
        ((90, 60, 30), True),
    ],
)
def test_a_machine_that_errs_again_and_again_is_not_trained_on(hours_ago: tuple[int, ...], goes_on: bool) -> None:
    mismatches = [
        incident(n, cause="fingerprint_mismatch", signature=f"fingerprint_mismatch:{n}", at_s=1.0 - hours * HOUR)
        for n, hours in enumerate(hours_ago, 1)
    ]
    answer = plan(verdict(Cause.FINGERPRINT_MISMATCH), 10, 10, mismatches, POLICY)
    assert (answer.event, answer.exit_code) == (
        (Event.FAULT, 0) if goes_on else (Event.GIVE_UP, SilentCorruption.exit_code)
    )


@pytest.mark.parametrize(
    ("node", "onset", "signature", "out", "goes_on"),
    [
        (A, 5, "x", (), False),
        (B, 5, "x", (), True),  # bad luck on two
        (A, 5, "x", (A,), True),
        (B, 9, "x", (), False),  # nobody has come further since
        (B, 9, "x", (B,), False),
        (B, 5, "same", (), False),
        (B, 5, "same", (B,), False),  # which is no node's fault
    ],
)
def test_flips_add_up_on_one_node_in_one_way_or_where_nobody_comes_further(
    node: NodeId, onset: int, signature: str, out: tuple[NodeId, ...], goes_on: bool
) -> None:
    found = verdict(Cause.FINGERPRINT_MISMATCH, signature="same")
    found = replace(found, blamed=(replace(found.blamed[0], onset=Step(9)),))
    flip = incident(cause="fingerprint_mismatch", at_s=0.5, nodes=(node,), signature=signature, onset=Step(onset))
    answer = plan(found, 10, 8, [flip, replace(flip, id="0002")], POLICY, shut_out={*out})
    assert (answer.event is Event.FAULT) is goes_on
    assert goes_on or f"devices of {'a' if node == A else 'b and a'}, then" in answer.reason


def test_the_same_tensors_at_the_same_step_say_more() -> None:
    before = [incident(n, cause="fingerprint_mismatch", signature="same", at_s=0.5) for n in (1, 2)]
    assert "a faulty core" in plan(verdict(Cause.FINGERPRINT_MISMATCH, signature="same"), 10, 10, before, POLICY).reason
    assert "faulty hardware" in plan(verdict(Cause.FINGERPRINT_MISMATCH), 10, 10, before, POLICY).reason


@pytest.mark.parametrize(
    ("signature", "named"), [("fingerprint_mismatch:nodes:1.0.9", True), ("fingerprint_mismatch:9:1:w", False)]
)
def test_where_nodes_go_apart_again_and_again_the_switch_for_those_that_do_on_purpose_is_named(
    signature: str, named: bool
) -> None:
    before = [incident(n, cause="fingerprint_mismatch", signature=signature, at_s=0.5) for n in (1, 2)]
    answer = plan(verdict(Cause.FINGERPRINT_MISMATCH, signature=signature), 10, 10, before, POLICY)
    assert ("--set stability.compare_nodes=false" in answer.reason) is named


def test_restarts_without_progress_do_not_count_against_a_flipped_bit() -> None:
    """It takes the state back on purpose."""
    assert plan(verdict(Cause.FINGERPRINT_MISMATCH), 10, 5, killed(10, 10, 10), POLICY).event is Event.FAULT


@pytest.mark.parametrize(
    ("past", "step"),
    [
        ([], -1),
        ([incident(1)], -1),
        ([incident(1, onset=Step(8))], 8),
        ([incident(1, onset=Step(8)), incident(2, onset=Step(5)), incident(3)], 5),
        ([incident(1, onset=Step(8), resume_step=Step(7))], -1),
        ([incident(1, onset=Step(8), open=False)], -1),
    ],
)
def test_the_bound_holds_until_the_job_has_gone_on(past: list[Incident], step: int) -> None:
    assert bound(past) == step


@pytest.mark.parametrize("trained", [0, 1])
def test_a_script_that_cannot_be_run_ends_the_job_at_the_second_start(trained: int) -> None:
    """Whether the job has trained before or not: no wait brings the script back."""
    first = verdict(Cause.SCRIPT_RAISED, started=False, signature="gone")
    broken = replace(first, blamed=(replace(first.blamed[0], broken=True),))
    again = [replace(incident(1, at=200), started=False, cause="script_raised", signature="gone", at_s=0.5)]
    assert plan(broken, 200, 200, [], POLICY, size=Size(trained=trained)).exit_code == 0
    assert plan(broken, 200, 200, again, POLICY, size=Size(trained=trained)).exit_code == 5
    assert plan(first, 200, 200, again, POLICY, size=Size(trained=1)).exit_code == 0  # its data may come back
