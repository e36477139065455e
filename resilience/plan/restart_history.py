"""Computes, from the job's incidents, the counts for the budgets of `escalation` and the bounds on the state to resume from. Pure."""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import pairwise, takewhile
from typing import NamedTuple

from ..diagnose.root_cause import Verdict
from ..model.cause import Cause
from ..model.incident import Incident
from ..model.types import NodeId, Step

RANKS_ENDED = (Cause.SCRIPT_RAISED, Cause.RANK_HUNG, Cause.RANK_KILLED, Cause.TORCH_MISSING)
"""Causes that are found when ranks cannot start on their nodes."""

NO_LIFE = (Cause.SNAPSHOT_UNUSABLE, Cause.SNAPSHOT_UNREADABLE)
"""Causes that end a worker group before it has begun to train."""


class Size(NamedTuple):
    """The job's number of nodes, now and before."""

    now: int = 1
    trained: int = 0
    """Number of nodes when the ranks last finished steps; 0: never."""
    left: bool = False
    """Whether the job had already left the present number, and came back because no other number was available."""
    alive: int = 1
    """Number of nodes whose agents are alive, spares included."""

    @property
    def another(self) -> bool:
        """Whether the job has trained on another number of nodes."""
        return self.trained not in (0, self.now)


ONE = Size()
"""A job on one node that has finished no step."""


def failed_starts(begun: Sequence[Incident], reached: int, size: int) -> int:
    """Return how many starts in a row have failed on `size` nodes, the present one included. If a fault is seen while the next start waits,
    that start counts as failed."""
    failed = takewhile(lambda i: not i.started and (i.step_at_fault < 0 or i.step_at_fault >= reached), reversed(begun))
    return 1 + sum(i.size == size and _failed(i) for i in failed)


def failed_behind(restarts: Sequence[Incident], signature: str, reached: int) -> int:
    """Return how often the script has failed in this way after its last step, the present failure included."""
    behind = takewhile(lambda incident: incident.step_at_fault >= reached, reversed(restarts))
    return 1 + sum(incident.signature == signature and not _began_earlier(incident) for incident in behind)


def failed_alike(
    verdict: Verdict, restarts: Sequence[Incident], unwatched_progress_s: float, shut_out: Set[NodeId]
) -> int:
    """Return how many starts in a row have failed in this way before the first step, the present one included."""
    alike, at_s = 1, verdict.at_s
    for incident in reversed(restarts):
        lived_s = at_s - incident.at_s  # since that restart
        if incident.started or incident.signature != verdict.signature:
            break
        if lived_s >= unwatched_progress_s and verdict.cause is Cause.SCRIPT_RAISED:
            break
        alike, at_s = alike + (not explained(incident.nodes, shut_out)), incident.at_s
    return alike


def explained(nodes: Sequence[NodeId], shut_out: Set[NodeId]) -> bool:
    """Whether a fault on these nodes cannot recur, because none of them trains any more."""
    return bool(nodes) and shut_out >= {*nodes}


def _failed(incident: Incident) -> bool:
    """Whether a start failed, or another fault was seen while the next start waited."""
    return not incident.started and (incident.cause in RANKS_ENDED or incident.pause_s > 0)


class Life(NamedTuple):
    """One generation of the worker group: the step and the time at which it began, and why and on which nodes the generation before it
    ended."""

    step: int
    at_s: float
    nodes: Sequence[NodeId]
    cause: str
    after_none: bool = False
    """Whether the start before it had failed."""


def without_progress(
    restarts: Sequence[Incident], verdict: Verdict, reached: int, kept: int, unwatched_progress_s: float, trained: bool
) -> list[Life]:
    """For each of the last generations without progress, return the generation that followed it, the newest first. A generation without
    progress left no newer state than it began with. The present generation is included. If the job has trained, failed starts are not:
    `failed_starts` counts them."""
    told = any(incident.step_at_fault >= 0 for incident in restarts) or reached >= 0
    begun: list[Life] = []
    for incident in restarts:
        no_start = trained and _failed(incident)
        if begun and (incident.cause in NO_LIFE or no_start):
            begun.pop()  # its snapshot is not used again; the numbers of snapshots and of failed starts are limited
            while no_start and begun and begun[-1].after_none:
                begun.pop()  # a fault seen meanwhile, such as a restarted agent, has an entry of its own in between
        if incident.resume_step is not None:
            # After the last step no progress is possible, however far before it the ranks begin.
            since = incident.step_at_fault if incident.loop_skipped else incident.resume_step
            begun.append(Life(since, incident.at_s, incident.nodes, incident.cause, no_start))
    stuck: list[Life] = []
    for life, end in reversed([*pairwise([*begun, Life(kept, verdict.at_s, verdict.nodes, verdict.cause)])]):
        if end.step > life.step or (not told and end.at_s - life.at_s >= unwatched_progress_s):
            break
        stuck.append(end)
    return stuck


def since_ordered(past: Sequence[Incident]) -> Sequence[Incident]:
    """Return the incidents after the last ordered rewind, and after the last change of the number of nodes because starts failed. Budgets
    begin anew there, because neither the older state nor failures on the other number of nodes are a lack of progress."""
    last = max((at for at, i in enumerate(past) if i.cause == Cause.ORDERED or i.unfit), default=-1)
    return past[last + 1 :]


def bound(past: Sequence[Incident]) -> Step:
    """Return the step that the state to resume from must precede; -1: any state will do. The bound holds until the job has resumed."""
    return min((i.onset for i in _unanswered(past) if i.onset >= 0), default=Step(-1))


def skipped_to(past: Sequence[Incident]) -> Step:
    """Return the training's last step, if ranks that began at this step have failed after their loop; -1: no ranks have. Ranks that begin
    at the last step do not run the loop's body, and the script may need what the body computes. So the ranks of the next start begin at an
    earlier step. Like `bound`, this limit holds until the job has resumed."""
    return max((i.step_at_fault for i in _unanswered(past) if i.loop_skipped), default=Step(-1))


def _began_earlier(incident: Incident) -> bool:
    """Whether the next ranks began before the last step, and so ran the loop's body, which the failed ranks had not run."""
    return incident.loop_skipped and incident.resume_step is not None and incident.resume_step < incident.step_at_fault


def _unanswered(past: Sequence[Incident]) -> list[Incident]:
    return [i for i in past if i.would is None and i.open and i.resume_step is None]


def unreadable(past: Sequence[Incident]) -> set[Step]:
    """Return the steps on disk that two generations could not read. The snapshots of these steps stay on disk: storage may recover."""
    failed = [i.step_at_fault for i in past if i.cause == Cause.SNAPSHOT_UNREADABLE]
    return {step for step in failed if failed.count(step) > 1}
