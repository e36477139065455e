"""The job at one moment, in figures: what it does, its nodes, its newest snapshots, and what a fault would cost now. Pure. The leader makes
it from the World, for /metrics and for the journal's `progress` lines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from ..incidents import membership_changes
from ..membership import buddy_sources, quarantine, rank_assignment
from ..membership.node_roles import leader, roles
from ..model.cluster_state import World, once
from ..model.state_machine import Phase
from ..model.types import NodeId
from ..plan.escalation import OBSERVE, STOP
from . import status_view


class State(StrEnum):
    """What the job does. Each value is a label of `mt_resilient_state`."""

    TRAINING = "training"
    RECOVERING = "recovering"
    STARTING = "starting"
    WAITING = "waiting for nodes"
    PAUSED = "paused"
    ENDED = "ended"


TIERS = ("memory", "other node", "disk", "certified")
"""Where a snapshot lies: in the members' own memory; in another node's memory; on disk. `certified`: the newest stable one, wherever it
lies."""
LOSSES = ("a rank", "a node", "all nodes")
"""What may be lost now (`Overview.at_risk`)."""


@dataclass(frozen=True, kw_only=True)
class Overview:
    state: State
    step: int = -1
    """Newest step that any member has finished; -1: none."""
    generation: int = 0
    leader: str = ""
    """The node whose agent leads."""
    nodes: dict[str, int] = field(default_factory=dict)
    """Number of nodes by role (`node_roles.Role`)."""
    spares: int = 0
    """Number of spares that the job was told to expect."""
    quarantined: int = 0
    missing: int = 0
    """Number of nodes that must join before the job begins, or begins again."""
    snapshots: dict[str, int] = field(default_factory=dict)
    """By tier: the newest step that the whole job can restore; -1: none."""
    at_risk: dict[str, int] = field(default_factory=dict)
    """For each of LOSSES: number of steps that would be computed again if this were lost now."""


@once
def overview(world: World, now: float) -> Overview:
    """Return the overview at wall-clock time `now`."""
    found = roles(world, now)
    counts = {str(role): [*found.values()].count(role) for role in dict.fromkeys(found.values())}
    said = [world.status[node] for node in world.members if node in world.status]
    step, doing = max((status.max_step for status in said), default=-1), _state(world, now)
    kept = {
        "memory": _common(buddy_sources.own(world).values()),
        "other node": _common(_copied(world).values()),
        "disk": _common(status.durable_steps for status in said),
        "certified": min((max(s.certified_steps, default=-1) for s in said), default=-1),
    }
    memory, disk = max(kept["memory"], kept["disk"]), kept["disk"]
    back_to = dict(zip(LOSSES, (memory, max(kept["other node"], disk), disk), strict=True))
    return Overview(
        state=doing,
        step=step,
        generation=world.record.number if world.record else 0,
        leader=leader(world) or "",
        nodes=counts,
        spares=world.spec.spares if world.spec else 0,
        quarantined=len(quarantine.in_force(world, now)),
        missing=_missing(world, now) if doing is State.WAITING else 0,
        snapshots=kept,
        at_risk={loss: max(0, step - max(0, to)) for loss, to in back_to.items()},
    )


def _missing(world: World, now: float) -> int:
    """Return how many nodes the job waits for."""
    fewest = min(rank_assignment.allowed(world, now), default=0)
    lost = membership_changes.missed(world, now)
    return len(lost) or max(0, fewest - len(rank_assignment.usable(world, now)))


def _copied(world: World) -> dict[NodeId, set[int]]:
    """Return, by member of a job of several nodes, the steps of which another member holds a copy."""
    members = world.members
    found: dict[NodeId, set[int]] = {node: set() for node in members if len(members) > 1}
    for holder in found:
        for copy in world.status[holder].copies if holder in world.status else ():
            if copy.nodes == len(members) and members[copy.node_rank] != holder:
                found[members[copy.node_rank]].add(copy.step)
    return found


def _common(steps: Iterable[Iterable[int]]) -> int:
    """Return the newest step that all have; -1: there is none."""
    sets = [set(each) for each in steps]
    return max(set.intersection(*sets), default=-1) if sets else -1


def _state(world: World, now: float) -> State:
    record, told = world.record, world.statuses()
    if record and record.over and world.begun:
        return State.ENDED
    if status_view.awaited(world, now) or membership_changes.missed(world, now):
        return State.WAITING
    if record is None or not world.begun:
        return State.STARTING
    if record.paused and told and all(status.paused for status in told):
        return State.PAUSED
    if any(i.open and OBSERVE < i.rung < STOP for i in world.incidents):
        return State.RECOVERING
    running = record.phase is Phase.RUN and len(told) == len(world.members) and all(status.stepped_s for status in told)
    return State.TRAINING if running else State.STARTING
