"""One immutable picture of the job: everything in the store, read at one moment, parsed. Judgement starts from here, every time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from .generation import GenerationRecord, Quarantine
from .incident import Incident
from .node import Ack, AckKind, Death, NodeRecord, NodeStatus, Spec
from .request import Answer, Request
from .types import NodeId

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True, kw_only=True)
class World:
    spec: Spec | None
    record: GenerationRecord | None
    nodes: Mapping[NodeId, NodeRecord]
    """Whose agents live: their leases do, and no neighbour has seen them dead."""
    status: Mapping[NodeId, NodeStatus]
    """What each node has said last, whether it is a member or has left, and of whatever generation (`statuses` chooses)."""
    acks: Mapping[NodeId, Ack]
    """For the record's generation, by the instances that it names."""
    incidents: tuple[Incident, ...]
    requests: tuple[Request, ...]
    """Answered ones too, the oldest first."""
    answers: Mapping[str, Answer] = field(default_factory=dict)
    """By request."""
    quarantine: Mapping[NodeId, Quarantine] = field(default_factory=dict)
    since_s: Mapping[NodeId, float] = field(default_factory=dict)
    """Wall-clock time at which who leads has first seen a node that may become a member: other nodes' clocks are not asked."""
    heard_s: Mapping[NodeId, float] = field(default_factory=dict)
    """By the same clock: when who leads has heard a node's status; what was there before it has led is as old as the node said."""
    dead: Mapping[str, Death] = field(default_factory=dict)
    """By instance."""
    leader: str = ""
    """The agent that leads, by instance; empty: none does."""

    _known: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What `once` has found out,"""
    _said: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """and what `once_said` has."""

    @cached_property
    def members(self) -> tuple[NodeId, ...]:
        return tuple(self.record.members) if self.record else ()

    @property
    def begun(self) -> bool:
        """Whether the record is of the job's present life."""
        return self.record is not None and (self.spec is None or self.record.number >= self.spec.first_generation)

    def all_acked(self, *kinds: AckKind) -> bool:
        return len(self.acks) == len(self.members) > 0 and all(ack.kind in kinds for ack in self.acks.values())

    def with_incidents(self, changed: Iterable[Incident]) -> World:
        """The same, with new and changed incidents in it."""
        changed = tuple(changed)
        if not changed:
            return self
        newest = {incident.id: incident for incident in (*self.incidents, *changed)}
        world = replace(self, incidents=tuple(newest.values()))
        world._said.update(self._said)
        return world

    def statuses(self) -> list[NodeStatus]:
        """Of members that have reported in the record's generation."""
        return _statuses(self)

    def uncalm(self) -> dict[NodeId, NodeStatus]:
        """What nodes have said, members or not, where it tells of ends, stalls, rewinds or anything else that is seldom: whoever looks for
        that need not look at all of thousands."""
        return _uncalm(self)

    def uncalm_statuses(self) -> list[NodeStatus]:
        """Of `statuses`, the same."""
        return _of_members(self, self.uncalm())

    def held(self) -> dict[NodeId, str]:
        """What members' ranks have held, where they tell it (`node_divergence`)."""
        return {node: told.held for node in self.members if (told := self.status.get(node)) and told.held}


def once(judge: Callable[Concatenate[World, P], T]) -> Callable[Concatenate[World, P], T]:
    """What follows from a World, and a time, is found out once, for a World never changes."""

    @wraps(judge)
    def known(world: World, *args: P.args, **kwargs: P.kwargs) -> T:
        asked = (judge, *args)
        if asked not in world._known:
            world._known[asked] = judge(world, *args, **kwargs)
        return world._known[asked]

    return known


def once_said(judge: Callable[[World], T]) -> Callable[[World], T]:
    """The same of what nodes have said, which the World with other incidents (`with_incidents`) knows, too."""

    @wraps(judge)
    def known(world: World) -> T:
        if judge not in world._said:
            world._said[judge] = judge(world)
        return world._said[judge]

    return known


@once_said
def _statuses(world: World) -> list[NodeStatus]:
    return _of_members(world, world.status)


def _of_members(world: World, told: Mapping[NodeId, NodeStatus]) -> list[NodeStatus]:
    number, members = (world.record.number, world.record.members) if world.record else (0, {})
    return [s for n, s in told.items() if n in members and s.generation == number]


@once_said
def _uncalm(world: World) -> dict[NodeId, NodeStatus]:
    return {
        node: told
        for node, told in world.status.items()
        if told.exits
        or told.stalls
        or told.rewinds
        or told.declined
        or told.mismatches
        or told.stragglers
        or told.shortage
        or told.complaints
        or told.frozen >= 0
    }
