"""What the last starts and lives of the worker group have come to: what the budgets of `escalation` are counted by, and what bounds the
state to go on from. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import NamedTuple

from ..diagnose.root_cause import Verdict
from ..model.cause import Cause
from ..model.incident import Incident
from ..model.types import NodeId, Step

RANKS_ENDED = (Cause.SCRIPT_RAISED, Cause.RANK_HUNG, Cause.RANK_KILLED, Cause.TORCH_MISSING)
"""How ranks end that cannot begin where they are."""

NO_LIFE = (Cause.SNAPSHOT_UNUSABLE, Cause.SNAPSHOT_UNREADABLE)
"""The worker group has not come so far as to begin."""


class Size(NamedTuple):
    """Of a job, in nodes."""

    now: int = 1
    trained: int = 0
    """When steps were made last; 0: never."""
    left: bool = False
    """This number has been left before, and no other one could be had."""

    @property
    def another(self) -> bool:
        """The job has trained on another number."""
        return self.trained not in (0, self.now)


ONE = Size()
"""A job on one node that has made no step."""


def failed_starts(begun: Sequence[Incident], reached: int, size: int) -> int:
    """In a row, on so many nodes, with the present one. What is seen while the next one waits is told as of it."""
    failed = takewhile(lambda i: not i.started and (i.step_at_fault < 0 or i.step_at_fault >= reached), reversed(begun))
    return 1 + sum(i.size == size and _failed(i) for i in failed)


def failed_behind(restarts: Sequence[Incident], signature: str, reached: int) -> int:
    """How often the script has failed in this way behind its last step, with the present time."""
    behind = takewhile(lambda incident: incident.step_at_fault >= reached, reversed(restarts))
    return 1 + sum(incident.signature == signature and not _began_earlier(incident) for incident in behind)


def _failed(incident: Incident) -> bool:
    """Whether a start did, or another fault was seen while the next one waited."""
    return not incident.started and (incident.cause in RANKS_ENDED or incident.pause_s > 0)


class _Life(NamedTuple):
    """Of the worker group: what it began with, when, and where the one before it was ended."""

    step: int
    at_s: float
    nodes: Sequence[NodeId]
    after_none: bool = False
    """The start before it had failed."""


def without_progress(
    restarts: Sequence[Incident], verdict: Verdict, reached: int, kept: int, unwatched_progress_s: float, trained: bool
) -> list[Sequence[NodeId]]:
    """Of the last lives of the worker group, the present one included, that left no newer state to go back to than they began with: where
    each was ended. Of a job that has trained, starts that fail are counted by themselves."""
    told = any(incident.step_at_fault >= 0 for incident in restarts) or reached >= 0
    begun: list[_Life] = []
    for incident in restarts:
        no_start = trained and _failed(incident)
        if begun and (incident.cause in NO_LIFE or no_start):
            begun.pop()  # its snapshot is not asked for again, and there are only so many; of starts that fail too
            while no_start and begun and begun[-1].after_none:
                begun.pop()  # what was seen meanwhile, an agent that began anew, has a life of its own in between
        if incident.resume_step is not None:
            # Behind the last step there is nothing to come to, however far before it the ranks begin.
            since = incident.step_at_fault if incident.loop_skipped else incident.resume_step
            begun.append(_Life(since, incident.at_s, incident.nodes, no_start))
    stuck: list[Sequence[NodeId]] = []
    for life, end in reversed([*pairwise([*begun, _Life(kept, verdict.at_s, verdict.nodes)])]):
        if end.step > life.step or (not told and end.at_s - life.at_s >= unwatched_progress_s):
            break
        stuck.append(end.nodes)
    return stuck


def since_ordered(past: Sequence[Incident]) -> Sequence[Incident]:
    """Those after the last rewind that somebody has ordered, and after the last change to another number of nodes because the script did
    not start: budgets begin anew with it, for older states, and what failed there, are no lack of progress then."""
    last = max((at for at, i in enumerate(past) if i.cause == Cause.ORDERED or i.unfit), default=-1)
    return past[last + 1 :]


def bound(past: Sequence[Incident]) -> Step:
    """The state to go on from is older than this step; -1: any is. It holds until the job has gone on."""
    return min((i.onset for i in _unanswered(past) if i.onset >= 0), default=Step(-1))


def skipped_to(past: Sequence[Incident]) -> Step:
    """The last step, where ranks that began at it have failed behind their loop: what they lack may be what the loop's body makes, so the
    next ones begin earlier. -1: none have. Like the bound, it holds until the job has gone on."""
    return max((i.step_at_fault for i in _unanswered(past) if i.loop_skipped), default=Step(-1))


def _began_earlier(incident: Incident) -> bool:
    """Whether what it lacked behind the loop was made up for: the next ranks ran the loop's body."""
    return incident.loop_skipped and incident.resume_step is not None and incident.resume_step < incident.step_at_fault


def _unanswered(past: Sequence[Incident]) -> list[Incident]:
    return [i for i in past if i.would is None and i.open and i.resume_step is None]


def unreadable(past: Sequence[Incident]) -> set[Step]:
    """Steps on disk that two lives of the worker group in turn could not read. They stay where they are: storage may come to itself."""
    failed = [i.step_at_fault for i in past if i.cause == Cause.SNAPSHOT_UNREADABLE]
    return {step for step in failed if failed.count(step) > 1}
