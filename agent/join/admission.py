"""Decides what an agent that wants to join does, from the job's data in etcd. Pure functions.

               other agents are there                no other agent is there
never begun    JOIN                                  BEGIN
under way      JOIN                                  ALL_DEAD; JOIN if others have just decided so, or may train cut off
ended          LEAVERS; JOIN_LIFE if the command     NEXT_LIFE; JOIN_LIFE if others have just begun the next run; DONE
               was given again; DONE
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from ...resilience.model.cause import Cause
from ...resilience.model.data_windows import Window, merged
from ...resilience.model.generation import GenerationRecord
from ...resilience.model.incident import Incident, turns
from ...resilience.model.node import NodeRecord, Spec
from ...resilience.model.rewind import left_out
from ...resilience.model.state_machine import Phase
from ...resilience.model.types import Generation, NodeId


class Course(Enum):
    DONE = "the job is finished: this agent has nothing to do"
    BEGIN = "the job has not begun: it begins with this node"
    JOIN = "the job is under way, or may be: this node joins it"
    ALL_DEAD = "no agent of the job is left: it continues with the agents that come now"
    LEAVERS = "the job has ended, and some of its agents have not exited yet: wait for them"
    NEXT_LIFE = "the job was stopped early: it continues, with new budgets"
    JOIN_LIFE = "the job was stopped early, and another node has begun the next run already"


@dataclass(frozen=True, kw_only=True)
class Found:
    known: Spec
    record: GenerationRecord | None
    others: Mapping[NodeId, NodeRecord]
    """Registered agents, except an agent with this node's name."""
    incidents: tuple[Incident, ...]
    just: bool
    """True: an agent has written the job's description to etcd within the last minute, for the first time or again."""

    @property
    def over(self) -> Generation:
        """Return the number of the generation with which the job ended; 0: the job has not ended."""
        return self.record.number if self.record and self.record.over else Generation(0)

    @property
    def windows(self) -> tuple[Window, ...]:
        """Return the data windows (skipped batches) of the job. An operator's orders or the ranks' own decisions skipped them."""
        done = [*(self.record.turns if self.record else ()), *turns(self.incidents)]
        return merged((*self.known.windows, *left_out(done)))

    def unheard(self, node: NodeId) -> bool:
        """Return whether an open incident says that a member is only cut off from etcd. The ranks of a cut-off member and of the other
        members may still train, although no agent could record that. False if `node` is a member itself."""
        record = self.record
        if record is None or node in record.members:
            return False
        told = [i for i in self.incidents if i.open and i.cause == Cause.CUT_OFF and i.generation == record.number]
        return any(not record.members.keys().isdisjoint(incident.nodes) for incident in told)

    def done(self, kept: int) -> bool:
        """Return whether the training is complete, its last state is on disk, and no agent has begun a new run. kept: the newest step on
        disk; -1: there is no snapshot, and only the script's own checkpoints exist."""
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
    """Return the course: what this agent does. several: the command is for more than one node. finished: this node's run directory records
    that the job is finished. kept: the newest step on disk; -1: none. Whether a job of one node is finished is recorded only in its run
    directory."""
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
    """Return whether other nodes may be training: the job has several nodes now, or had several in its last generation."""
    return several or (found.record is not None and len(found.record.members) > 1)
