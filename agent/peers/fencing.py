"""Whether an agent that has no lease any more has to end its ranks: only where others may have begun a new generation without it.

A generation without this node begins when its lease is over; then its other members end their ranks, and no step of the old one is finished
any more, for at each boundary all ranks have said their word (`training/boundary/allreduce.py`). So ranks that go on finishing steps prove
that nobody has begun anything without them, however long etcd is away, for whomever. Where they stand still, somebody may have. And where
those that stand by would do for a generation of their own (one node and a spare), steps prove nothing (`rank_assignment.proves`). Ranks
whose loop is over finish no step and begin none either: they are left to write down what they have.

Standing still is measured in time in which the agent was awake (`monitor/rank_progress.py`): of a machine that slept, ranks slept too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ...resilience.ipc.board_layout import Page
from ...resilience.membership import rank_assignment
from ...resilience.model.generation import GenerationRecord
from ...resilience.model.node import NodeStatus, Spec
from ...resilience.model.types import Doing, RankPhase
from ..monitor.rank_progress import LONGEST_ROUND_S
from ..ranks.worker_group import WorkerGroup
from .lease import Heartbeat

STRIDES = 3.0
"""A step may take so many times as long as the longest of the last ones until the ranks count as standing still."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """All in seconds of the monotonic clock."""

    lease_until_s: float
    """The lease lives at least so long: counted from before its last renewal was sent."""
    ttl_s: float
    proof: bool
    """Nodes that are no members are too few for a generation of their own: none can begin without a member, which ends its ranks for it."""
    still_s: float
    """For how long the ranks of this node have not been seen to finish a step."""
    stride_s: float
    """The longest time that they took for one, of late."""
    over: bool
    """Their loop is at its end."""


def fenced(now_s: float, at: Standing) -> bool:
    """Whether the ranks have to be ended now."""
    if now_s <= at.lease_until_s:
        return False
    return not at.proof or (not at.over and at.still_s > max(at.ttl_s, STRIDES * at.stride_s))


class Pulse:
    """For how long ranks have stood still, and how long they take for a step."""

    def __init__(self) -> None:
        self._generation, self._looked_s = 0, 0.0
        self._seen = 0, 0
        self.stepped_s = 0.0
        """When a step was seen to be finished last,"""
        self.still_s = 0.0
        """for how long none was, in time in which the agent was awake,"""
        self.stride_s = 0.0
        """and the longest of such times, of late."""

    def look(self, generation: int, seen: tuple[int, int], now_s: float) -> None:
        """seen: the last step of all local ranks, and what is another one where all have waited together instead. A start counts as a step:
        ranks that come up meet each other too."""
        self.still_s += min(now_s - self._looked_s, LONGEST_ROUND_S)
        self._looked_s = now_s
        if generation != self._generation:
            self._generation, self._seen = generation, seen
            self.stepped_s, self.still_s, self.stride_s = now_s, 0.0, 0.0
        elif seen != self._seen:
            # Forgets in some steps, several of which one look may find, what was a start or an evaluation.
            steps = max(1, seen[0] - self._seen[0])
            self.stride_s = max(self.still_s, 0.8**steps * self.stride_s)
            self._seen, self.stepped_s, self.still_s = seen, now_s, 0.0


class Ranks(Protocol):
    """What is fenced."""

    group: WorkerGroup | None

    def fence(self) -> None:
        """End them."""


class Board(Protocol):
    @property
    def pages(self) -> Sequence[Page]:
        """Of the local ranks."""
        ...

    def leased(self, until_s: float) -> None:
        """No rank shall cross a boundary after this time of the monotonic clock; 0: they may."""


class Fence:
    """This node's: how long its ranks may go on without a word from the others."""

    def __init__(self, heartbeat: Heartbeat, spec: Spec, ranks: Ranks, board: Board) -> None:
        self._heartbeat, self._spec, self._ranks, self._board = heartbeat, spec, ranks, board
        self._members = 0
        """Of the present generation."""
        self._lease = 0
        """That the present generation was seen with."""
        self.steps = Pulse()
        self._stepped_at_s = 0.0
        """Wall-clock time at which one was seen to be finished last."""

    @property
    def proof(self) -> bool:
        """Whether ranks that finish steps prove that nobody has begun without them."""
        return rank_assignment.proves(self._spec.sizes, self._spec.spares, self._members)

    def bind(self, seen: GenerationRecord | None) -> None:
        """Tell the ranks how long they may go on without a word from this agent. seen: the present generation, where it was read since this
        agent has its lease; before that, others may have begun."""
        if seen:
            self._lease, self._members = self._heartbeat.lease, len(seen.members)
        if self._lease == self._heartbeat.lease:
            self._board.leased(0.0 if self.proof else self._heartbeat.until_s)

    def left_s(self, now_s: float) -> float:
        """Until the next look at whether the ranks have to be ended. now_s: monotonic."""
        until_s = self._heartbeat.until_s
        return until_s - now_s if self._ranks.group and not self.proof and until_s > now_s else math.inf

    def look(self, now_s: float, wall_s: float) -> str:
        """End the ranks where the others may go on without them; why, where they were ended now. now_s: monotonic."""
        group = self._ranks.group
        if group is None or group.fenced:
            return ""
        known_s, pages = self.steps.stepped_s, self._board.pages
        # Of ranks that wait, the beats count: they go on saying their words.
        waits = all(page.doing == Doing.PAUSED for page in pages)
        seen = min(page.step for page in pages), min(page.beat_ns for page in pages) if waits else 0
        self.steps.look(group.generation, seen, now_s)
        if self.steps.stepped_s != known_s:
            self._stepped_at_s = wall_s
        standing = Standing(
            lease_until_s=self._heartbeat.until_s,
            ttl_s=self._heartbeat.ttl_s,
            proof=self.proof,
            still_s=self.steps.still_s,
            stride_s=self.steps.stride_s,
            over=all(page.phase == RankPhase.FINISHED for page in pages),
        )
        if not fenced(now_s, standing):
            return ""
        self._ranks.fence()
        why = ", and the ranks finish no step" if standing.proof else ""  # else their steps prove nothing
        return f"no word from etcd for the life of this agent's lease{why}: the others may go on without this node, so its ranks are ended"

    def pulse(self, status: NodeStatus) -> NodeStatus:
        """`status`, and how the ranks step: so others can tell whether a node that they do not hear trains."""
        group = self._ranks.group
        if group is None or group.generation != status.generation:
            return status
        return replace(status, pulse_s=self._stepped_at_s, stride_s=round(self.steps.stride_s, 3))
