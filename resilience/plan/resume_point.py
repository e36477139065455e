"""Decides which states are stable, and from which state the job resumes: always one sealed snapshot that every member can read. A snapshot
is identified by its lineage and its step, because two lineages may have snapshots of the same step.

    sealed ──replicas compared──▶ agreed ──`certify_after_steps` later steps──▶ certified (marked on disk; the last one is never deleted)

After a fault that cannot have damaged the state (a killed rank, a dead agent), the job resumes from the newest state. If the verdict has
an *onset*, the first step whose state is known to be wrong, the job resumes from the newest older state whose replicas agreed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ..errors import UsageError
from ..model.node import NodeStatus
from ..model.signals import Snapshot
from ..model.types import Step


@dataclass(frozen=True, kw_only=True)
class StabilityPolicy:
    """When a snapshot counts as certified. The newest certified snapshot is never deleted."""

    certify_after_steps: int = 100
    """A snapshot whose replicas agreed is certified after this many further clean steps. By then, a fault in that
    state has usually shown.

    PaLM (arXiv:2204.02311, section 5.1) answers a loss spike by going back about as many steps, so a fault in an older
    state has shown by then."""

    compare_nodes: bool = True
    """Whether nodes that should hold the same bits are compared. Set `stability.compare_nodes` to false if nodes begin
    to diverge on purpose, as in local SGD after a warm-up."""

    def __post_init__(self) -> None:
        if self.certify_after_steps < 1:
            raise UsageError(f"stability.certify_after_steps is {self.certify_after_steps}; it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    step: Step
    """The step to resume from; -1: no state is kept, so the script starts from its own beginning."""
    course: tuple[int, ...] = ()
    """Generation and number of rewinds of that step's snapshot."""
    reason: str


def stable(agreed: Iterable[Step], clean: Step, policy: StabilityPolicy) -> tuple[Step, ...]:
    """Return the steps that are certified once all ranks have finished step `clean`, in ascending order. agreed: steps of the present
    lineage whose replicas agreed."""
    return tuple(step for step in sorted(agreed) if step + policy.certify_after_steps <= clean)


def common(statuses: Sequence[NodeStatus], avoid: Collection[Step] = ()) -> set[Snapshot]:
    """Return the snapshots that every node holds in memory or can read from disk. avoid: steps on disk that storage did not return. If an
    older agent tells no lineages, they are unknown for all: the snapshots are then compared by their steps."""
    alike = {  # most of thousands of nodes are alike
        (s.memory_steps, s.courses, s.durable_steps, s.durable_courses): s for s in statuses
    }
    kept = [s.kept(avoid) for s in alike.values()]
    if any(len(each) == 1 for some in kept for each in some):
        kept = [{each[-1:] for each in some} for some in kept]
    return set.intersection(*kept) if kept else set()


def common_steps(statuses: Sequence[NodeStatus], avoid: Collection[Step] = ()) -> set[Step]:
    """Return the steps of the snapshots that `common` returns."""
    return {Step(each[-1]) for each in common(statuses, avoid)}


def choose(
    statuses: Sequence[NodeStatus], avoid: Collection[Step] = (), onset: int = -1, skipped_to: int = -1
) -> ResumePoint:
    """Return the newest step whose snapshot every node holds in memory or can read from disk. With an onset, return the newest step before
    the onset at which the replicas agreed on all nodes; if there is none, the newest step before the onset. One node may use its memory and
    another the disk: for one snapshot, both hold the same bytes. avoid: steps on disk that storage did not return. skipped_to: the
    training's last step, if the next ranks must begin before it so that the loop's body runs; -1: they need not. If no older state is kept,
    they begin at that step."""
    if not statuses:
        return ResumePoint(step=Step(-1), reason="no node has reported a snapshot")
    found = common(statuses, avoid)
    bound = ""
    if before := {each for each in found if each[-1] < skipped_to}:
        found, bound = (
            before,
            f": from step {skipped_to} the loop's body did not run, and the script failed after its loop",
        )
    if onset < 0:
        return _newest(statuses, found, "there is no snapshot to resume from", bound)
    older = {each for each in found if each[-1] < onset}
    steps = set.intersection(*({*s.agreed_steps, *s.certified_steps} for s in statuses))
    agreed = {each for each in older if each[-1] in steps}
    bound = f", the newest before step {onset}"
    if any(s.compared for s in statuses):
        bound += " at which the replicas agreed"
    if older and not agreed:
        bound = f", the newest before step {onset}; whether its replicas agreed is not known"
    return _newest(statuses, agreed or older, f"there is no snapshot from before step {onset}", bound)


def exactly(statuses: Sequence[NodeStatus], step: Step, avoid: Collection[Step] = ()) -> ResumePoint | None:
    """Return the ordered `step` as the state to start from; None: it is not kept."""
    found = {each for each in common(statuses, avoid) if each[-1] == step}
    return _newest(statuses, found, "", ", as ordered") if found else None


def _newest(statuses: Sequence[NodeStatus], found: Collection[Snapshot], none: str, bound: str = "") -> ResumePoint:
    """Return the newest step of `found`. If several lineages have it, return the newest lineage's."""
    if not found:
        return ResumePoint(step=Step(-1), reason=f"the job's beginning: {none}")
    newest = max(found, key=lambda each: (each[-1], each))
    step = Step(newest[-1])
    from_memory = sum(newest in s.remembered() for s in statuses)
    where = "memory" if from_memory == len(statuses) else "disk" if not from_memory else "memory and disk"
    return ResumePoint(step=step, course=newest[:-1], reason=f"step {step} from {where}{bound}")
