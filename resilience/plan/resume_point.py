"""Which state is stable, and which to go back to. Only sealed snapshots of one step that every member can read.

    sealed ──replicas compared──▶ agreed ──`certify_after_steps` later steps──▶ certified (marked on disk, never the last one deleted)

A fault that cannot have touched the state (a killed rank, a dead agent) costs least from the newest one. A verdict with an *onset*, the
first step whose state is known to be wrong, leaves what is older than that: the newest that has agreed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ..errors import UsageError
from ..model.node import NodeStatus
from ..model.types import Step


@dataclass(frozen=True, kw_only=True)
class StabilityPolicy:
    """When a snapshot counts as certified."""

    certify_after_steps: int = 100
    """Clean steps after a snapshot whose replicas agreed, until it is certified.

    A loss spike is answered by going back about as many (PaLM, arXiv:2204.02311, section 5.1), so whatever will be
    found wrong with an older state has shown by then."""

    compare_nodes: bool = True
    """Whether nodes whose ranks are replicas of each other are compared. Set it to false if nodes
    begin to diverge on purpose, as in local SGD after a warm-up."""

    def __post_init__(self) -> None:
        if self.certify_after_steps < 1:
            raise UsageError(f"stability.certify_after_steps is {self.certify_after_steps}; it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    step: Step
    """-1: nothing is kept; start as the script itself does."""
    reason: str


def stable(agreed: Iterable[Step], clean: Step, policy: StabilityPolicy) -> tuple[Step, ...]:
    """Of the steps of the present lineage whose replicas have agreed, ascending, those that are certified once all ranks have finished
    step `clean`."""
    return tuple(step for step in sorted(agreed) if step + policy.certify_after_steps <= clean)


def common_steps(statuses: Sequence[NodeStatus], avoid: Collection[Step] = ()) -> set[Step]:
    """That every node holds in memory or can read from disk. avoid: steps on disk that storage has not given when it was asked."""
    alike = {(s.memory_steps, s.durable_steps) for s in statuses}  # most of thousands are
    return set.intersection(*({*memory, *({*disk} - {*avoid})} for memory, disk in alike)) if alike else set()


def choose(
    statuses: Sequence[NodeStatus], avoid: Collection[Step] = (), onset: int = -1, skipped_to: int = -1
) -> ResumePoint:
    """The newest step that every node holds in memory or can read from disk; with an onset, the newest before it that has agreed on all
    of them, else, of those that nobody has compared, the newest. A node's own tier does not matter to its peers: all tiers of one step
    hold the same bytes. avoid: steps on disk that storage has not given when it was asked for them; skipped_to: the last step,
    where the next ranks are to begin earlier so that the loop's body runs; -1: they need not. Where nothing older is kept, they cannot."""
    if not statuses:
        return ResumePoint(step=Step(-1), reason="no node has reported a snapshot")
    common = common_steps(statuses, avoid)
    bound = ""
    if before := {step for step in common if step < skipped_to}:
        common, bound = before, f": from step {skipped_to} the loop's body did not run, and the script failed behind it"
    if onset < 0:
        return _newest(statuses, common, "there is no snapshot that can be gone back to", bound)
    older = {step for step in common if step < onset}
    agreed = older.intersection(*({*s.agreed_steps, *s.certified_steps} for s in statuses))
    bound = f", the newest before step {onset} at which the replicas agreed"
    if older and not agreed:
        bound = f", the newest before step {onset}; whether its replicas agreed is not known"
    return _newest(statuses, agreed or older, f"there is no snapshot from before step {onset}", bound)


def exactly(statuses: Sequence[NodeStatus], step: Step, avoid: Collection[Step] = ()) -> ResumePoint | None:
    """That very step, because it is ordered; None where it is not kept."""
    return _newest(statuses, {step}, "", ", as ordered") if step in common_steps(statuses, avoid) else None


def _newest(statuses: Sequence[NodeStatus], steps: Collection[Step], none: str, bound: str = "") -> ResumePoint:
    if not steps:
        return ResumePoint(step=Step(-1), reason=f"the job's beginning: {none}")
    step = max(steps)
    from_memory = sum(step in s.memory_steps for s in statuses)
    where = "memory" if from_memory == len(statuses) else "disk" if not from_memory else "memory and disk"
    return ResumePoint(step=step, reason=f"step {step} from {where}{bound}")
