"""Which state to go back to. Only sealed snapshots of one step that every member can read; the newest of them.

(Certification by later clean steps and by fingerprints narrows this choice further; the verdict's onset bounds it already where
ranks rewind in place, in `boundary`.)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .signals import NodeStatus, Step


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    step: Step
    """-1: nothing is kept; start as the script itself does."""
    reason: str


def choose(statuses: Sequence[NodeStatus], avoid: Collection[Step] = ()) -> ResumePoint:
    """The newest step that every node holds in memory or can read from disk. A node's own tier does not matter to its peers: all
    tiers of one step hold the same bytes. avoid: steps on disk that storage has not given when it was asked for them."""
    if not statuses:
        return ResumePoint(step=Step(-1), reason="no node has reported a snapshot")
    held = [{*s.memory_steps, *({*s.durable_steps} - {*avoid})} for s in statuses]
    common = set.intersection(*held)
    if not common:
        return ResumePoint(step=Step(-1), reason="the job's beginning: there is no snapshot yet")
    step = max(common)
    from_memory = sum(step in s.memory_steps for s in statuses)
    where = "memory" if from_memory == len(statuses) else "disk" if not from_memory else "memory and disk"
    return ResumePoint(step=step, reason=f"step {step} from {where}")
