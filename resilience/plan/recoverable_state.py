"""Computes how far the training has come, and which state the ranks can go back to. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ..membership import buddy_sources
from ..model.cluster_state import World, once, once_said
from ..model.generation import RewindOrder
from ..model.node import AckKind, NodeStatus
from ..model.signals import Snapshot
from ..model.state_machine import Phase
from ..model.types import NodeId, Step
from .restart_history import bound, skipped_to, unreadable
from .resume_point import ResumePoint, choose, exactly


@once_said
def step_reached(world: World) -> Step:
    """Return the newest step that any rank finished in this generation; if none did, the step that it started from. Steps of snapshots are
    included: a killed agent may have reported a snapshot before it reported its ranks' step."""
    record = world.record
    runs = record is not None and record.phase is Phase.RUN
    told = ((s.max_step, *s.memory_steps, *s.durable_steps) if runs else (s.max_step,) for s in world.statuses())
    newest = max(map(max, told), default=-1)
    over = record.replay_until if record and record.phase is Phase.ENDING and record.complete else -1
    return Step(max(newest, record.resume_step if record else -1, over))


@once_said
def said(world: World) -> list[NodeStatus]:
    """Return the members' statuses. `memory_steps` includes the steps that a member can fetch from another node's memory. The list excludes
    steps for which the member's own memory holds other ranks' parts."""
    own, lent = buddy_sources.own(world), buddy_sources.fetchable(world)
    told = ((world.status[n], own.get(n, ()), lent.get(n, {})) for n in world.members if n in world.status)
    return [s if s.memory_steps == kept and not had else _with(s, kept, had) for s, kept, had in told]


def _with(status: NodeStatus, kept: tuple[Step, ...], lent: Collection[Snapshot]) -> NodeStatus:
    """Return the status of a node whose memory holds the steps `kept`, and that can fetch the snapshots `lent`."""
    steps, courses = [Step(each[-1]) for each in lent], [each[:-1] for each in lent]
    return replace(status, memory_steps=(*steps, *kept), courses=(*courses, *(status.courses if kept else ())))


def onset(world: World) -> Step:
    """Return the first step that is known to be wrong; -1: the state is not suspected."""
    return bound(world.incidents)


@once
def point(world: World) -> ResumePoint:
    """Return the state from which the next ranks start."""
    return choose(said(world), unreadable(world.incidents), onset(world), skipped_to(world.incidents))


def unseen(world: World) -> list[NodeId]:
    """Return the ready members that do not see the storage of snapshots, if no state to start from is found without it."""
    told = {node: world.status[node] for node in world.members if node in world.status}
    blind = [node for node, status in told.items() if not status.storage]
    return blind if world.all_acked(AckKind.READY) and point(world).step < 0 else []


def ordered(world: World, order: RewindOrder) -> ResumePoint | None:
    """Return the ordered step as the state to start from; None: it is not kept."""
    if not order.left:
        return exactly(said(world), order.to, unreadable(world.incidents))
    there = sees(world, order) and order.to not in unreadable(world.incidents)
    return ResumePoint(step=order.to, reason=f"step {order.to} from {order.left}, as ordered") if there else None


def sees(world: World, order: RewindOrder) -> bool:
    """Whether every member sees the snapshot that an earlier order set aside, and to which this order comes back."""
    told = world.statuses()
    return bool(order.left) and len(told) == len(world.members) and all(s.left == order.left for s in told)


def newest(world: World) -> Step:
    """Return the newest step that the ranks could go back to now. What a lost agent held in memory is lost, except for its copies in other
    nodes' memory."""
    return choose(said(world)).step


def sound(world: World, onset: Step) -> Step:
    """Return the newest step before `onset` at which the replicas agreed; if there is none, the newest kept step before `onset`; -1: none
    is kept."""
    return choose(said(world), unreadable(world.incidents), onset).step


def saved(world: World) -> bool:
    """Whether all ranks wait, and the state at which they wait is on disk. Before the first step, nothing needs to be on disk."""
    told = world.statuses()
    done = max((said.max_step for said in told), default=-1)
    at = (
        done if done >= 0 or world.record is None else world.record.resume_step
    )  # after a rewind in place, `done` may be older than `resume_step`
    return len(told) == len(world.members) and all(s.paused and (at < 0 or at in s.durable_steps) for s in told)
