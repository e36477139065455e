"""Decides whether an agent without a valid lease must end its ranks. The agent must end its ranks if the other agents may have begun a new
generation without it.

When this node's lease has expired, a generation without it may begin. At its beginning, the other members end their own ranks. No step of
the old generation completes after that, because every rank takes part in each boundary (`training/boundary/allreduce.py`). So ranks that
keep finishing steps prove that no new generation has begun, however long etcd does not answer, and whichever agents it does not answer. If
the ranks finish no step, a new generation may have begun. Finished steps prove nothing if the spares alone could form a generation (as with
one node and a spare; `rank_assignment.proves`). Ranks whose training loop is over compute no steps: the agent lets them finish their
writes.

The time without a step counts only while the agent itself runs (`monitor/rank_progress.py`): when a machine is suspended, its ranks are
suspended too.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Protocol

from ...resilience.membership import rank_assignment
from ...resilience.model.generation import GenerationRecord
from ...resilience.model.node import NodeStatus, Spec
from ...resilience.model.types import Doing, RankPhase
from ..monitor.rank_progress import LONGEST_ROUND_S
from ..ranks.board import Board
from ..ranks.worker_group import WorkerGroup
from .lease import Heartbeat

STRIDES = 3.0
"""Ranks count as standing still (finishing no step) after this many times the duration of the longest recent step."""


def fenced(*, lease_left_s: float, ttl_s: float, proof: bool, still_s: float, stride_s: float, over: bool) -> bool:
    """Return whether the agent must end its ranks now. lease_left_s: how long the lease is valid at least; negative: it may have expired.
    proof: the nodes that are not members are too few for a generation, so any new generation needs a member, which first ends its own
    ranks. still_s: seconds since this agent last saw its ranks finish a step. stride_s: the longest duration of a recent step. over: the
    training loops of all local ranks are over."""
    if lease_left_s >= 0:
        return False
    return not proof or (not over and still_s > max(ttl_s, STRIDES * stride_s))


class Pulse:
    """Measures how long ranks have finished no step, and how long their steps take."""

    def __init__(self) -> None:
        self._generation, self._looked_s = 0, 0.0
        self._seen = 0, 0
        self.stepped_s = 0.0
        """When this agent last saw a step finish."""
        self.still_s = 0.0
        """Seconds since then without a finished step, counting only time in which this agent ran."""
        self.stride_s = 0.0
        """The longest recent time between two finished steps, in seconds."""

    def look(self, generation: int, seen: tuple[int, int], now_s: float) -> None:
        """Record the ranks' progress. seen: the last step that all local ranks have finished, and their oldest heartbeat if all wait in a
        pause. The start of a generation counts as a step, because all ranks take part in the rendezvous."""
        self.still_s += min(now_s - self._looked_s, LONGEST_ROUND_S)
        self._looked_s = now_s
        if generation != self._generation:
            self._generation, self._seen = generation, seen
            self.stepped_s, self.still_s, self.stride_s = now_s, 0.0, 0.0
        elif seen != self._seen:
            # The long duration of a start or an evaluation decays within some steps. Several steps may have finished since the last call.
            steps = max(1, seen[0] - self._seen[0])
            self.stride_s = max(self.still_s, 0.8**steps * self.stride_s)
            self._seen, self.stepped_s, self.still_s = seen, now_s, 0.0


class Ranks(Protocol):
    """The ranks that the agent may have to end."""

    group: WorkerGroup | None

    def fence(self) -> None:
        """End all ranks of this node."""


class Fence:
    """Decides how long this node's ranks may continue without an answer from etcd."""

    def __init__(self, heartbeat: Heartbeat, spec: Spec, ranks: Ranks, board: Board) -> None:
        self._heartbeat, self._spec, self._ranks, self._board = heartbeat, spec, ranks, board
        self._members = 0
        """Number of members of the present generation."""
        self._lease = 0
        """The lease that this agent had when it read the present generation's record."""
        self.steps = Pulse()
        self._stepped_at_s = 0.0
        """Wall-clock time when this agent last saw a step finish."""

    @property
    def proof(self) -> bool:
        """True if finished steps prove that no generation has begun without this node's ranks."""
        return rank_assignment.proves(self._spec.sizes, self._spec.spares, self._members)

    def bind(self, seen: GenerationRecord | None) -> None:
        """Write into the ranks' pages until when they may continue without a new message from this agent. seen: the present generation's
        record, if this agent read it under its present lease. Until this agent has read the record under a new lease, other agents may have
        begun a new generation."""
        if seen:
            self._lease, self._members = self._heartbeat.lease, len(seen.members)
        if self._lease == self._heartbeat.lease:
            self._board.leased(0.0 if self.proof else self._heartbeat.until_s)

    def left_s(self, now_s: float) -> float:
        """Return the seconds until the agent must check again whether to end the ranks. now_s: monotonic."""
        until_s = self._heartbeat.until_s
        return until_s - now_s if self._ranks.group and not self.proof and until_s > now_s else math.inf

    def look(self, now_s: float, wall_s: float) -> str:
        """End the ranks if the other nodes may continue without them. Return the reason if the ranks were ended now, else an empty text.
        now_s: monotonic."""
        group = self._ranks.group
        if group is None or group.fenced:
            return ""
        known_s, pages = self.steps.stepped_s, self._board.pages
        # Ranks in a pause finish no step, but they keep exchanging messages at the boundary: their heartbeats count.
        waits = all(page.doing == Doing.PAUSED for page in pages)
        seen = min(page.step for page in pages), min(page.beat_ns for page in pages) if waits else 0
        self.steps.look(group.generation, seen, now_s)
        if self.steps.stepped_s != known_s:
            self._stepped_at_s = wall_s
        if not fenced(
            lease_left_s=self._heartbeat.until_s - now_s,
            ttl_s=self._heartbeat.ttl_s,
            proof=self.proof,
            still_s=self.steps.still_s,
            stride_s=self.steps.stride_s,
            over=all(page.phase == RankPhase.FINISHED for page in pages),
        ):
            return ""
        self._ranks.fence()
        why = ", and the ranks finish no step" if self.proof else ""  # without proof, finished steps do not matter
        return (
            f"etcd has not answered for the lifetime of this agent's lease{why}: the other nodes may continue without this node, so this "
            "agent ends its ranks"
        )

    def pulse(self, status: NodeStatus) -> NodeStatus:
        """Return `status` with the ranks' last step time and step duration. From these, other agents judge whether a node that is cut off
        still trains."""
        group = self._ranks.group
        if group is None or group.generation != status.generation:
            return status
        return replace(status, pulse_s=self._stepped_at_s, stride_s=round(self.steps.stride_s, 3))
