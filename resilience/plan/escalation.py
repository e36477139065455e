"""From the verdict to the plan: the cheapest rung (kind of answer) that can help, and when to give up.

The ranks themselves decide rung 1, the rewind in place (`tally`), and only report it. The exception is diverged replicas, which no rank can
see: this module orders that rewind. Every other verdict restarts the worker group (rung 2) or stops the job (rung 6). A restart becomes
rung 3 if a spare replaces a node, and rung 4 if the number of nodes changes (`rank_assignment` chooses the nodes).
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from ..diagnose.root_cause import Verdict
from ..errors import (
    BudgetSpent,
    LayoutError,
    MachineError,
    ResilientError,
    ScriptError,
    SilentCorruption,
    SnapshotError,
    StateError,
    UsageError,
)
from ..model.cause import Cause, Kind
from ..model.generation import Seats
from ..model.incident import Incident
from ..model.node import NodeStatus
from ..model.state_machine import Event
from ..model.types import NodeId
from ..text import formatting, sentences, verdicts
from .last_attempts import hung_again, may_begin_anew
from .restart_history import (
    NO_LIFE,
    ONE,
    RANKS_ENDED,
    Size,
    explained,
    failed_alike,
    failed_behind,
    failed_starts,
    since_ordered,
    without_progress,
)
from .resume_point import ResumePoint

OBSERVE, REWIND_IN_PLACE, RESTART_GROUP, REPLACE_NODE, REPLAN, STOP = 0, 1, 2, 3, 4, 6
RESTARTS = (RESTART_GROUP, REPLACE_NODE, REPLAN)

_LONGEST_PAUSE_S = 300.0
"""Longest wait between failed starts, in seconds. A file server's fail-over takes seconds to minutes."""
_STARTS_ELSEWHERE = 5
"""Maximum number of failed starts on a number of nodes on which the job has not trained. The waits between these starts take 31 s together.
The loss of a node disturbs the network for a shorter time."""

_FROM_LEFT = "If one of them is good, start from it: mt-resilient run --run-dir NEW --start-from DIR/snapshots/NAME"
_BEFORE = "although the job has trained before"


@dataclass(frozen=True, kw_only=True)
class RecoveryPolicy:
    """When the job stops instead of recovering once more."""

    max_without_progress: int = 3
    """The job stops after this many restarts in a row that brought no newer snapshot to resume from. Restarts that a
    node in quarantine caused count half.

    NVRx stops after three. On another node the next restart may succeed, and the number of nodes is limited."""
    unwatched_progress_s: float = 600.0
    """For scripts whose steps are not visible: ranks that have lived for this many seconds count as having made
    progress.

    Steps are not visible if a script has no Session and none of the known loops."""
    same_failure_at_start: int = 2
    """The job stops after this many identical failures before the first step or after the last one, because the error
    is then in the script. If the job has trained since the command was given, `failed_starts` limits the failures
    before the first step instead."""
    failed_starts: int = 7
    """A job that has trained before stops after this many failed starts in a row, whatever the failures were. The
    cause may be temporary, such as a full disk or missing data. So the job waits before it starts again: 1 s after
    the second failure, then 5, 25, 125 and 300 s. On a number of nodes on which the job has not trained, five
    failures are the limit. The job then tries another allowed number; if there is none, it tries again every 300 s."""
    max_mismatches: int = 3
    """The job stops when replicas diverge for this many times within `mismatch_window_h`, because the hardware is
    then unreliable. A divergence counts if an earlier one hit the same nodes, had the same tensors at the same step,
    or began at the same or a later step. Divergences on nodes in quarantine do not count."""
    in_place_s: float = 30.0
    """How many seconds the ranks may take to reach a boundary when replicas have diverged and they must rewind in
    place. After that, all ranks restart. Raise `recovery.in_place_s` if one step takes longer."""
    mismatch_window_h: float = 24.0
    """Number of hours in which `max_mismatches` counts divergences.

    One flipped bit in a long training is bad luck (Llama 3: 6 in 54 days of 16,384 GPUs), several in a day are a bad
    part."""

    def __post_init__(self) -> None:
        for name in ("max_without_progress", "same_failure_at_start", "failed_starts", "max_mismatches"):
            if getattr(self, name) < 1:
                raise UsageError(f"recovery.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("unwatched_progress_s", "mismatch_window_h", "in_place_s"):
            if getattr(self, name) <= 0:
                raise UsageError(f"recovery.{name} is {getattr(self, name)}; it must be more than 0")


@dataclass(frozen=True, kw_only=True)
class Plan:
    event: Event
    rung: int
    reason: str
    exit_code: int = 0
    unfit: int = 0
    """The restart must have another number of nodes than this; 0: it may have any number."""
    pause_s: float = 0.0
    """How long a restart waits before its ranks start, in seconds."""


def plan(
    verdict: Verdict,
    reached: int,
    kept: int,
    past: Sequence[Incident],
    policy: RecoveryPolicy,
    *,
    in_place: bool = False,
    shut_out: Set[NodeId] = frozenset(),
    size: Size = ONE,
) -> Plan:
    """Return the answer to `verdict`. reached: newest finished step; kept: newest state that the ranks can go back to (both are -1 if there
    is none). past: all earlier incidents of the job; incidents that were only observed are ignored. in_place: all ranks are alive and can
    rewind in place. shut_out: nodes that no longer train; the script is not blamed for faults on them."""
    past = [incident for incident in past if incident.would is None]
    reason = ". ".join(filter(None, ("restart the worker group", verdict.advice)))
    restart = Plan(event=Event.FAULT, rung=RESTART_GROUP, reason=reason)
    begun = [i for i in since_ordered(past) if i.rung in RESTARTS]
    restarts = [i for i in begun if i.cause != Cause.MOVED]
    if verdict.cause in tuple(Kind):
        return _answer_to_wrong_steps(verdict, past, restart, may_begin_anew(verdict, restarts, reached, kept))
    if verdict.cause is Cause.FINGERPRINT_MISMATCH:
        return _answer_to_mismatch(verdict, past, policy, in_place, shut_out)
    if verdict.cause is Cause.STATE_REFUSED and not verdict.started:
        if size.another:
            return _leave("the ranks refuse the snapshot", restart, size)
        return _give_up(
            LayoutError,
            "a snapshot fits only the script and layout that wrote it. Give that command again, or start anew with another --run-dir",
        )
    if verdict.cause is Cause.STATE_UNSAVABLE and not verdict.started:
        return _give_up(StateError, "no step was made. Correct the script, then give the same command again")
    if (
        verdict.cause in (Cause.SCRIPT_RAISED, Cause.RANK_HUNG)
        and not verdict.started
        and (verdict.broken or not size.trained)
    ):
        alike = failed_alike(verdict, restarts, policy.unwatched_progress_s, shut_out)
        if alike >= policy.same_failure_at_start:
            what = "hung" if verdict.cause is Cause.RANK_HUNG else "failed"
            said = f"the script {what} {alike} times in the same way before it reported a step"
            return _give_up(ScriptError, f"{said}: the error is in the script")
    if verdict.cause is Cause.SCRIPT_RAISED and verdict.through:
        alike = failed_behind(restarts, verdict.signature, reached)
        if alike >= policy.same_failure_at_start:
            said = f"the training is complete, but the script failed {alike} times in the same way after its loop"
            return _give_up(ScriptError, f"{said}: the error is in the script")
    if verdict.cause in RANKS_ENDED and not verdict.started and size.trained:
        failed = failed_starts(begun, reached, size.now)
        causes = [*([i.cause for i in begun if not i.started][-failed + 1 :] if failed > 1 else []), verdict.cause]
        return _answer_to_failed_starts(failed, causes, restart, policy, size)
    if verdict.cause is Cause.TORCH_MISSING:
        return _give_up(MachineError, "repair the installation, then give the same command again")
    unusable = verdict.cause is Cause.SNAPSHOT_UNUSABLE and not verdict.started
    if unusable and begun and begun[-1].resume_step == -1:
        return _give_up(
            SnapshotError,
            "the snapshot of another job to start from is damaged, and this job has none. Name another one with --start-from",
        )
    if verdict.cause in NO_LIFE:
        return restart
    stuck = without_progress(restarts, verdict, reached, kept, policy.unwatched_progress_s, size.trained > 0)
    spent = sum(0.5 if explained(life.nodes, shut_out) else 1.0 for life in stuck)
    again = hung_again(verdict, restarts, reached, policy.max_without_progress, max(size.now, size.alive))
    hung = "" if explained(verdict.nodes, shut_out) else again
    if spent >= policy.max_without_progress or hung:
        missed = f"did not get beyond the snapshot of step {kept}" if kept >= 0 else "brought no snapshot"
        told = verdicts.tallied([life.cause for life in stuck])
        said = hung or f"{formatting.count(len(stuck), 'restart')} in a row {missed}: {told}"
        if not verdict.started and size.another:
            return _leave(said, restart, size)
        return _give_up(BudgetSpent, ". ".join(filter(None, (said, verdict.advice))))
    return restart


def seated(answer: Plan, seats: Seats, fails: bool) -> Plan:
    """Return `answer` with the rung and reason that a restart has with these `seats` (the nodes of the next generation). fails: starts are
    known to fail on that number of nodes. If starts are not known to fail there, the restart does not wait."""
    if answer.rung != RESTART_GROUP:
        return answer
    rung = REPLACE_NODE if seats.successors else REPLAN if seats.dropped or seats.joined else RESTART_GROUP
    pause_s = answer.pause_s if fails else 0.0
    soon = f"the next start is in {pause_s:g} s" if pause_s else ""
    soon += ", or earlier if another number of nodes is available" if pause_s and answer.unfit else ""
    reason = "; ".join(filter(None, (answer.reason, soon, sentences.seats(seats))))
    return replace(answer, rung=rung, pause_s=pause_s, reason=reason)


def _answer_to_wrong_steps(verdict: Verdict, past: Sequence[Incident], restart: Plan, anew: bool) -> Plan:
    """Return the answer to a fault for which the ranks have no remedy left. anew: new processes have not been tried yet."""
    if anew:
        said = "no rewind has helped: perhaps a variable that rewinds do not restore holds NaN. New processes begin without it"
        return replace(restart, reason=f"{restart.reason}; {said}")
    return _give_up(BudgetSpent, f"the ranks have tried every remedy. {verdicts.advice(past)}")


def _answer_to_mismatch(
    verdict: Verdict, past: Sequence[Incident], policy: RecoveryPolicy, in_place: bool, shut_out: Set[NodeId]
) -> Plan:
    """Return a rewind to before the onset. Return the end of the job once the budget is spent: nodes that diverge repeatedly have bad
    hardware. Unrelated divergences do not count: of thousands of nodes, three can have bad luck in a day, each at a later step than the
    previous divergence."""
    since_s, here = verdict.at_s - policy.mismatch_window_h * 3600, verdict.nodes

    def counts(before: Incident) -> bool:
        if before.signature == verdict.signature or before.onset >= verdict.onset >= 0:
            return True
        return not (before.nodes and {*here}.isdisjoint(before.nodes)) and not explained(before.nodes, shut_out)

    before = [i for i in past if i.cause == Cause.FINGERPRINT_MISMATCH and i.at_s >= since_s and counts(i)]
    if len(before) + 1 < policy.max_mismatches:
        how = "all ranks rewind in place to" if in_place else "restart the worker group from"
        reason = f"{how} before step {verdict.onset}; newer snapshots are set aside"
        return Plan(event=Event.FAULT, rung=REWIND_IN_PLACE if in_place else RESTART_GROUP, reason=reason)
    again = [i for i in before if i.signature == verdict.signature]
    who = (
        "the same tensors at the same step: perhaps a faulty core, or the script itself"
        if again
        else "perhaps faulty hardware"
    )
    onsets = sorted({*(i.onset for i in before), verdict.onset})
    at = f"first seen at {'step' if len(onsets) == 1 else 'steps'} {formatting.listed(onsets)}"
    where = dict.fromkeys((*(node for i in before for node in i.nodes), *here))
    return _give_up(
        SilentCorruption,
        f"replicas diverged {len(before) + 1} times within {policy.mismatch_window_h:g} h, {at} ({who}). Test the memory and the devices "
        f"of {formatting.listed([*where])}, then give the same command again{sentences.on_purpose(verdict.signature)}",
    )


def _answer_to_failed_starts(
    failed: int, causes: Sequence[str], restart: Plan, policy: RecoveryPolicy, size: Size
) -> Plan:
    """Return the answer to failed starts of a job that has trained. A start may fail because something that the job needs is missing for a
    while. On another number of nodes, the script may refuse the layout or not fit into memory, so the job tries its old number of nodes, or
    a third one."""
    said = f"{failed} starts in a row have failed before the first step"
    if size.another and (size.left or failed >= min(_STARTS_ELSEWHERE, policy.failed_starts)):
        return _leave(said, restart, size)
    if failed >= policy.failed_starts:
        what = f"{said}, {_BEFORE}: {verdicts.tallied(causes)}"
        return _give_up(BudgetSpent, f"{what}. Check what it needs (data, disks, network)")
    if failed == 1:
        return restart
    reason = f"{restart.reason}; {said}, {_BEFORE}"
    return replace(restart, pause_s=min(5.0 ** min(failed - 2, 4), _LONGEST_PAUSE_S), reason=reason)


def _leave(said: str, restart: Plan, size: Size) -> Plan:
    """Return a restart on another number of nodes, because the script does not start on the present one. The restart waits if the job had
    already left the present number and came back to it, because no other number was available."""
    here = f"on {formatting.count(size.now, 'node')} (the job has trained on {size.trained})"
    if not size.left:
        return replace(restart, reason=f"{said} {here}: the job tries another allowed number", unfit=size.now)
    reason = f"starts fail {here} and on every other available number: the job tries each in turn"
    return replace(restart, reason=reason, unfit=size.now, pause_s=_LONGEST_PAUSE_S)


def _give_up(error: type[ResilientError], reason: str) -> Plan:
    return Plan(event=Event.GIVE_UP, rung=STOP, exit_code=error.exit_code, reason=reason)


def may_resume(point: ResumePoint, statuses: Sequence[NodeStatus], unread: bool, onset: int = -1) -> Plan | None:
    """Return None if the worker group may start from `point`, else the plan that ends the job. If snapshots exist and none is usable, the
    training must not begin anew unless the user asks for it. unread: storage does not return some snapshots; onset: the first step that is
    known to be wrong; -1: no step is."""
    if point.step >= 0:
        return None
    unasked = "and the job does not start from the beginning unasked"
    anew = "To start from the beginning, name another directory with --run-dir"
    if unread or not all(status.storage for status in statuses):
        why = f"no snapshot can be read at present, {unasked}. Check the storage, then give the same command again"
        return _give_up(MachineError, why)
    if any(status.rejected_steps for status in statuses):
        return _give_up(
            SnapshotError,
            f"every snapshot is set aside, {unasked}. mt-resilient snapshots ls --all says why. {_FROM_LEFT}. {anew}",
        )
    if onset >= 0 and any(status.durable_steps for status in statuses):
        why = f"the state is wrong from step {onset} on, no older snapshot is left, {unasked}. {anew}"
        return _give_up(SnapshotError, f"{why}. Keep more snapshots (snapshots.keep)")
    return None
