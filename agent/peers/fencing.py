"""Whether an agent that has no lease any more has to end its ranks: only where others may have begun a new generation without it. Pure.

A generation without this node begins when its lease is over; then its other members end their ranks, and no step of the old one is finished
any more, for at each boundary all ranks have said their word (`training/boundary/allreduce.py`). So ranks that go on finishing steps prove
that nobody has begun anything without them, however long etcd is away, for whomever. Where they stand still, somebody may have. And where
those that stand by would do for a generation of their own (one node and a spare), steps prove nothing (`rank_assignment.proves`). Ranks
whose loop is over finish no step and begin none either: they are left to write down what they have.

Standing still is measured in time in which the agent was awake (`monitor/rank_progress.py`): of a machine that slept, ranks slept too.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from ..monitor.rank_progress import LONGEST_ROUND_S

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
        self._seen: Hashable = None
        self.stepped_s = 0.0
        """When a step was seen to be finished last,"""
        self.still_s = 0.0
        """for how long none was, in time in which the agent was awake,"""
        self.stride_s = 0.0
        """and the longest of such times, of late."""

    def look(self, generation: int, seen: Hashable, now_s: float) -> None:
        """seen: what is another one after a step of all local ranks. A start counts as a step: ranks that come up meet each other too."""
        self.still_s += min(now_s - self._looked_s, LONGEST_ROUND_S)
        self._looked_s = now_s
        if generation != self._generation:
            self._generation, self._seen = generation, seen
            self.stepped_s, self.still_s, self.stride_s = now_s, 0.0, 0.0
        elif seen != self._seen:
            # Forgets in some steps what was an evaluation.
            self.stride_s = max(self.still_s, 0.8 * self.stride_s)
            self._seen, self.stepped_s, self.still_s = seen, now_s, 0.0
