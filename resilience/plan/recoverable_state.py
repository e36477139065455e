"""How far the training has come, and which state there is to go back to: what a World tells of both. Pure."""

from __future__ import annotations

from dataclasses import replace

from ..membership import buddy_sources
from ..model.cluster_state import World, once, once_said
from ..model.node import NodeStatus
from ..model.state_machine import Phase
from ..model.types import Step
from .restart_history import bound, skipped_to, unreadable
from .resume_point import ResumePoint, choose, exactly


@once_said
def step_reached(world: World) -> Step:
    """Newest step that any rank finished in this generation, or, where it finished none, the one that it had started from. A killed agent
    may have told of a snapshot's step before it told of the ranks'."""
    record = world.record
    runs = record is not None and record.phase is Phase.RUN
    told = ((s.max_step, *s.memory_steps, *s.durable_steps) if runs else (s.max_step,) for s in world.statuses())
    newest = max(map(max, told), default=-1)
    over = record.replay_until if record and record.phase is Phase.ENDING and record.complete else -1
    return Step(max(newest, record.resume_step if record else -1, over))


@once_said
def said(world: World) -> list[NodeStatus]:
    """Of the members, with what they can have from other nodes' memory, and without what their own holds of other ranks."""
    own, lent = buddy_sources.own(world), buddy_sources.fetchable(world)
    told = ((world.status[n], own.get(n, ()), lent.get(n, ())) for n in world.members if n in world.status)
    return [
        s if s.memory_steps == kept and not had else replace(s, memory_steps=(*kept, *had)) for s, kept, had in told
    ]


def onset(world: World) -> Step:
    """The first step that is known to be wrong; -1: the state is not suspected."""
    return bound(world.incidents)


@once
def point(world: World) -> ResumePoint:
    """Where the next ranks are to start."""
    return choose(said(world), unreadable(world.incidents), onset(world), skipped_to(world.incidents))


def ordered(world: World, step: Step) -> ResumePoint | None:
    """That very step, because it is ordered; None where it is not kept."""
    return exactly(said(world), step, unreadable(world.incidents))


def newest(world: World) -> Step:
    """Newest step that the ranks could go back to now; what lay in the memory of an agent that is gone is gone with it, but for copies."""
    return choose(said(world)).step


def sound(world: World, onset: Step) -> Step:
    """The newest state from before `onset` at which the replicas agreed; -1: none."""
    return choose(said(world), unreadable(world.incidents), onset).step


def saved(world: World) -> bool:
    """Whether all ranks wait, and the disk has the state that they wait at; before the first step, nothing has to be there."""
    told = world.statuses()
    done = max((said.max_step for said in told), default=-1)
    at = (
        done if done >= 0 or world.record is None else world.record.resume_step
    )  # they may have gone back behind that, in place
    return len(told) == len(world.members) and all(s.paused and (at < 0 or at in s.durable_steps) for s in told)
