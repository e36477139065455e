"""Verdict → plan: the cheapest rung of the ladder that can help, and when to stop climbing.

Rung 1, the rewind in place, is decided by the ranks themselves (`tally`) and only reported here, but for replicas that have gone
apart, which no rank can see: there it is ordered. What else reaches this module needs the worker group to be restarted (rung 2), or the job
to stop (rung 6). Who trains next (`rank_assignment`) tells a restart on the same nodes from rung 3, where a spare takes a place, and rung
4, where their number changes.
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
from ..model.rewind import BLIND
from ..model.state_machine import Event
from ..model.types import NodeId
from ..text import formatting, sentences
from .restart_history import (
    NO_LIFE,
    ONE,
    RANKS_ENDED,
    Size,
    failed_behind,
    failed_starts,
    since_ordered,
    without_progress,
)
from .resume_point import ResumePoint

OBSERVE, REWIND_IN_PLACE, RESTART_GROUP, REPLACE_NODE, REPLAN, STOP = 0, 1, 2, 3, 4, 6
RESTARTS = (RESTART_GROUP, REPLACE_NODE, REPLAN)

_LONGEST_PAUSE_S = 300.0
"""Between starts that fail; a file server's fail-over takes seconds to minutes."""
_STARTS_ELSEWHERE = 5
"""So many are enough on another number of nodes than the job has trained on: 31 s, which outlasts what a network does as a node goes."""


@dataclass(frozen=True, kw_only=True)
class RecoveryPolicy:
    """Budgets: when recoveries end the job."""

    max_without_progress: int = 3
    """Restarts in a row without a newer snapshot to resume from, until the job stops. Restarts that were caused by a
    node in quarantine count half.

    NVRx stops after three. On another node the next restart may succeed, and there are only so many nodes."""
    unwatched_progress_s: float = 600.0
    """A script whose steps are not visible counts as having made progress after it has lived this long.

    Such a script has no Session and none of the known loops."""
    same_failure_at_start: int = 2
    """The script counts as faulty after this many identical failures before its first step or behind its last one. A
    script that has trained since the command was given falls under `failed_starts` instead."""
    failed_starts: int = 7
    """This many failed starts in a row, in whatever way, stop a job that has trained before. The cause may be
    temporary, such as a full disk or missing data. So the second and each further failure is followed by a wait: 1,
    5, 25, 125, 300 s. On a number of nodes on which the job has not trained, five failures are the limit. The job
    then tries another allowed number; if none is left, it tries again every 300 s."""
    max_mismatches: int = 3
    """How often replicas may diverge within `mismatch_window_h` until the job stops. Divergences count if they hit
    the same nodes, have the same signature, or start no later than an earlier one. Those on nodes in quarantine do
    not count."""
    in_place_s: float = 30.0
    """How long ranks may take to reach a boundary when they are told to rewind in place because replicas diverged.
    Then all ranks are restarted."""
    mismatch_window_h: float = 24.0
    """Hours over which `max_mismatches` counts.

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
    """A restart on any number of nodes but this one; 0: on any."""
    pause_s: float = 0.0
    """What a restart waits for before ranks start, in seconds."""


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
    """What to do about `verdict`. reached: newest finished step; kept: newest state that there is to go back to (-1: none, for both);
    past: all earlier incidents of the job, of which those that were only observed count for nothing; in_place: all ranks live and could go
    back by themselves; shut_out: nodes that train no more, and what failed there is not the script's."""
    past = [incident for incident in past if incident.would is None]
    restart = Plan(
        event=Event.FAULT, rung=RESTART_GROUP, reason="end what is left of the worker group, start it again, restore"
    )
    begun = [i for i in since_ordered(past) if i.rung in RESTARTS]
    restarts = [i for i in begun if i.cause != Cause.MOVED]
    if verdict.cause in tuple(Kind):
        blind = bool(past) and past[-1].remedy in BLIND
        what = "the model, its settings and its data" if blind else "the model and its settings"
        return _give_up(BudgetSpent, f"nothing that the ranks can do about it helps; look at {what}")
    if verdict.cause is Cause.FINGERPRINT_MISMATCH:
        return _answer_to_mismatch(verdict, past, policy, in_place, shut_out)
    if verdict.cause is Cause.STATE_REFUSED and not verdict.started:
        if size.another:
            return _leave("the ranks refuse the state that was kept", restart, size)
        return _give_up(
            LayoutError,
            "a snapshot is for the script and ranks that wrote it. Give the command that wrote it, or begin anew with another --run-dir",
        )
    if verdict.cause is Cause.STATE_UNSAVABLE and not verdict.started:
        return _give_up(StateError, "no step was made; mend the script, and give the same command again")
    if (
        verdict.cause in (Cause.SCRIPT_RAISED, Cause.RANK_HUNG)
        and not verdict.started
        and (verdict.broken or not size.trained)
    ):
        alike = _alike(verdict, restarts, policy, shut_out)
        if alike >= policy.same_failure_at_start:
            what = "hung" if verdict.cause is Cause.RANK_HUNG else "failed"
            said = f"the script {what} {alike} times in the same way before any step was told"
            return _give_up(ScriptError, f"{said}: an error of its own")
    if verdict.cause is Cause.SCRIPT_RAISED and verdict.through:
        alike = failed_behind(restarts, verdict.signature, reached)
        if alike >= policy.same_failure_at_start:
            said = f"the training is through, and the script failed {alike} times in the same way behind its loop"
            return _give_up(ScriptError, f"{said}: an error of its own")
    if verdict.cause in RANKS_ENDED and not verdict.started and size.trained:
        return _answer_to_failed_starts(failed_starts(begun, reached, size.now), restart, policy, size)
    if verdict.cause is Cause.TORCH_MISSING:
        return _give_up(MachineError, "mend the installation, then give the same command again")
    unusable = verdict.cause is Cause.SNAPSHOT_UNUSABLE and not verdict.started
    if unusable and begun and begun[-1].resume_step == -1:
        return _give_up(
            SnapshotError,
            "the snapshot of another job to start from is damaged, and there is none of this job: name another one with --start-from",
        )
    if verdict.cause in NO_LIFE:
        return restart
    stuck = without_progress(restarts, verdict, reached, kept, policy.unwatched_progress_s, size.trained > 0)
    spent = sum(0.5 if _explained(nodes, shut_out) else 1.0 for nodes in stuck)
    if spent >= policy.max_without_progress:
        newer = f"newer snapshot than that of step {kept}" if kept >= 0 else "snapshot"
        said = f"{len(stuck)} restarts in a row brought no {newer}"
        if not verdict.started and size.another:
            return _leave(said, restart, size)
        return _give_up(BudgetSpent, said)
    return restart


def seated(answer: Plan, seats: Seats, fails: bool) -> Plan:
    """A restart, on those nodes. fails: it is known to, on so many; on others there is nothing to wait for."""
    if answer.rung != RESTART_GROUP:
        return answer
    rung = REPLACE_NODE if seats.successors else REPLAN if seats.dropped or seats.joined else RESTART_GROUP
    pause_s = answer.pause_s if fails else 0.0
    soon = f"the next start is in {pause_s:g} s" if pause_s else ""
    soon += ", or as soon as another number of nodes can be had" if pause_s and answer.unfit else ""
    reason = "; ".join(filter(None, (answer.reason, soon, sentences.seats(seats))))
    return replace(answer, rung=rung, pause_s=pause_s, reason=reason)


def _answer_to_mismatch(
    verdict: Verdict, past: Sequence[Incident], policy: RecoveryPolicy, in_place: bool, shut_out: Set[NodeId]
) -> Plan:
    """Back to before the onset, and no further than the budget: who goes apart again and again has a bad part. On thousands of nodes,
    three have bad luck in a day now and then, and each later than the last."""
    since_s, here = verdict.at_s - policy.mismatch_window_h * 3600, verdict.nodes

    def counts(before: Incident) -> bool:
        if before.signature == verdict.signature or before.onset >= verdict.onset >= 0:
            return True
        return not (before.nodes and {*here}.isdisjoint(before.nodes)) and not _explained(before.nodes, shut_out)

    before = [i for i in past if i.cause == Cause.FINGERPRINT_MISMATCH and i.at_s >= since_s and counts(i)]
    if len(before) + 1 < policy.max_mismatches:
        how = "all ranks go back in place, to" if in_place else "end the worker group, start it again from"
        reason = f"{how} before step {verdict.onset}; newer snapshots are set aside"
        return Plan(event=Event.FAULT, rung=REWIND_IN_PLACE if in_place else RESTART_GROUP, reason=reason)
    again = [i for i in before if i.signature == verdict.signature]
    who = (
        "the same tensors at the same step: perhaps a core that computes wrongly, or the script itself"
        if again
        else "perhaps a bad part"
    )
    where = dict.fromkeys((*(node for i in before for node in i.nodes), *here))
    return _give_up(
        SilentCorruption,
        f"replicas went apart {len(before) + 1} times within {policy.mismatch_window_h:g} h ({who}): have the memory and the devices of "
        f"{formatting.listed([*where])} tested, then give the same command again{sentences.on_purpose(verdict.signature)}",
    )


def _answer_to_failed_starts(failed: int, restart: Plan, policy: RecoveryPolicy, size: Size) -> Plan:
    """Of a job that has trained. Something around it is away, and may come back; or, on another number of nodes, the script refuses the
    layout, or it does not fit into memory: it goes on where the number that it had, or a third one, can be had."""
    said = f"{failed} starts in a row have failed before the first step"
    if size.another and (size.left or failed >= min(_STARTS_ELSEWHERE, policy.failed_starts)):
        return _leave(said, restart, size)
    if failed >= policy.failed_starts:
        return _give_up(BudgetSpent, f"{said}, and it has trained before: look at what it needs (data, disks, network)")
    if failed == 1:
        return restart
    reason = f"{restart.reason}; {said}, and it has trained before"
    return replace(restart, pause_s=min(5.0 ** min(failed - 2, 4), _LONGEST_PAUSE_S), reason=reason)


def _alike(verdict: Verdict, restarts: Sequence[Incident], policy: RecoveryPolicy, shut_out: Set[NodeId]) -> int:
    """How many starts in a row have failed in this way before the first step, the present one included."""
    alike, at_s = 1, verdict.at_s
    for incident in reversed(restarts):
        lived_s = at_s - incident.at_s  # since that restart
        if incident.started or incident.signature != verdict.signature:
            break
        if lived_s >= policy.unwatched_progress_s and verdict.cause is Cause.SCRIPT_RAISED:
            break
        alike, at_s = alike + (not _explained(incident.nodes, shut_out)), incident.at_s
    return alike


def _leave(said: str, restart: Plan, size: Size) -> Plan:
    """This number of nodes, on which the script does not start, for another one; later, where it was left before, and the job was back on
    it for want of another."""
    here = f"on {formatting.count(size.now, 'node')}, and it has trained on {size.trained}"
    if not size.left:
        return replace(restart, reason=f"{said} {here}: another number is tried, if there is one", unfit=size.now)
    reason = f"no start goes well {here}, nor on any other number that can be had: they are tried in turn"
    return replace(restart, reason=reason, unfit=size.now, pause_s=_LONGEST_PAUSE_S)


def _give_up(error: type[ResilientError], reason: str) -> Plan:
    return Plan(event=Event.GIVE_UP, rung=STOP, exit_code=error.exit_code, reason=reason)


def may_resume(point: ResumePoint, statuses: Sequence[NodeStatus], unread: bool, onset: int = -1) -> Plan | None:
    """None where the worker group may start from `point`. Where snapshots were kept and none can be had, nobody wants to hear of it when
    the training has begun from its start again. unread: storage does not give some of them; onset: the first step that is known to be
    wrong;
    -1: none is."""
    if point.step >= 0:
        return None
    if unread or not all(status.storage for status in statuses):
        return _give_up(
            MachineError,
            "no snapshot can be read at present, and the training is not begun anew unasked: look after the storage, then give "
            "the same command again",
        )
    if any(status.rejected_steps for status in statuses):
        return _give_up(
            SnapshotError,
            "every snapshot has been set aside, and the training is not begun anew unasked: mend what damages them; to begin "
            "anew, name another directory with --run-dir",
        )
    if onset >= 0 and any(status.durable_steps for status in statuses):
        return _give_up(
            SnapshotError,
            f"every snapshot that is left is of step {onset} or later, from which on the state is wrong, and the training is not begun "
            "anew unasked: to begin anew, name another directory with --run-dir; and keep more snapshots (snapshots.keep)",
        )
    return None


def _explained(nodes: Sequence[NodeId], shut_out: Set[NodeId]) -> bool:
    """Whether what struck there does so no more: these nodes train no more."""
    return bool(nodes) and shut_out >= {*nodes}
