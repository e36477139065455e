"""What becomes of an agent that comes to a job, from what it finds of it in the store. Pure.

               agents are there                      none is
never begun    BEGIN                                 BEGIN
under way      JOIN                                  ALL_DEAD; JOIN where others have just said so, or may train unheard
ended          LEAVERS; JOIN_LIFE where it has       NEXT_LIFE; JOIN_LIFE where others have just begun it; DONE
               been given again; DONE
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from ...resilience.model.cause import Cause
from ...resilience.model.data_windows import Window, merged
from ...resilience.model.generation import GenerationRecord
from ...resilience.model.incident import Incident
from ...resilience.model.node import NodeRecord, Spec
from ...resilience.model.state_machine import Phase
from ...resilience.model.types import Generation, NodeId


class Course(Enum):
    DONE = "all of the job is done: there is nothing to do"
    BEGIN = "the job has not begun: it does with this node"
    JOIN = "the job is under way, or may be: this node joins it"
    ALL_DEAD = "nobody is left of it: it goes on with those that come now"
    LEAVERS = "it is over, and agents of it have not left: they do first"
    NEXT_LIFE = "it was ended before its end, and goes on with budgets as new"
    JOIN_LIFE = "the same, and another node has said so before"


@dataclass(frozen=True, kw_only=True)
class Found:
    known: Spec
    record: GenerationRecord | None
    others: Mapping[NodeId, NodeRecord]
    """Agents that are there, but for one of this node's name."""
    incidents: tuple[Incident, ...]
    just: bool
    """Somebody has described the job within the last minute, for the first time or again."""

    @property
    def over(self) -> Generation:
        """The number of the generation that the job has ended with; 0: it is not over."""
        return self.record.number if self.record and self.record.over else Generation(0)

    @property
    def windows(self) -> tuple[Window, ...]:
        """What has been left out of the data, by order or by the ranks' own judgement."""
        turns = [*(self.record.turns if self.record else ()), *(incident.turn for incident in self.incidents)]
        return merged((*self.known.windows, *(turn.window for turn in turns if turn and turn.window)))

    def unheard(self, node: NodeId) -> bool:
        """Whether a member is known to be cut off from etcd alone. Its ranks may be at work, and with them the others', which nobody was
        there to tell; unless `node` was a member."""
        record = self.record
        if record is None or node in record.members:
            return False
        told = [i for i in self.incidents if i.open and i.cause == Cause.CUT_OFF and i.generation == record.number]
        return any(not record.members.keys().isdisjoint(incident.nodes) for incident in told)

    def done(self, kept: int) -> bool:
        """Whether the job has ended with its training over and the state of that on disk, and nobody has let it begin anew. kept: the
        newest step there; -1: none is, and what the script has saved is all there is."""
        last = self.record
        if (
            last is None
            or last.phase is not Phase.ENDED
            or not last.complete
            or last.number < self.known.first_generation
        ):
            return False
        return kept < 0 or kept >= last.replay_until


def course(found: Found, node: NodeId, *, several: bool, finished: bool, kept: int) -> Course:
    """several: the command is for more than one node; finished: this node's run directory says that the job is; kept: the newest step on
    disk, -1 for none. Of one node's job, the run directory alone knows."""
    if several and (finished or found.done(kept)):
        return Course.DONE
    if found.over:
        if found.known.first_generation > found.over and (found.others or found.just):
            return Course.JOIN_LIFE
        return Course.LEAVERS if found.others else Course.NEXT_LIFE
    if found.others:
        return Course.JOIN
    if found.record is None:
        return Course.BEGIN
    given_again = found.just and found.known.given_up >= found.record.number
    return Course.JOIN if beside(found, several) and (given_again or found.unheard(node)) else Course.ALL_DEAD


def beside(found: Found, several: bool) -> bool:
    """Whether others than this node may be at work: whatever number of nodes is asked for now, others may have been."""
    return several or (found.record is not None and len(found.record.members) > 1)
