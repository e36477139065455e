"""One immutable picture of the job: everything in the store, read at one moment and parsed. Every decision starts from it."""

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
    """Nodes with a living agent: its lease is valid, and no neighbour has seen it dead."""
    status: Mapping[NodeId, NodeStatus]
    """The last status of each node, also of nodes that have left, and of any generation (`statuses` selects)."""
    acks: Mapping[NodeId, Ack]
    """Acknowledgements for the record's generation, from the agent instances that it names."""
    incidents: tuple[Incident, ...]
    requests: tuple[Request, ...]
    """All requests, answered ones too, the oldest first."""
    answers: Mapping[str, Answer] = field(default_factory=dict)
    """By the request's id."""
    quarantine: Mapping[NodeId, Quarantine] = field(default_factory=dict)
    since_s: Mapping[NodeId, float] = field(default_factory=dict)
    """By node that may become a member: when the leader first saw it, by the leader's own wall clock."""
    heard_s: Mapping[NodeId, float] = field(default_factory=dict)
    """By node, by the same clock: when the leader read its last status. The first status that it read has the node's own time."""
    dead: Mapping[str, Death] = field(default_factory=dict)
    """By the dead agent's instance."""
    leader: str = ""
    """Instance of the leader; empty: there is no leader."""

    _known: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Results that `once` has cached."""
    _said: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Results that `once_said` has cached."""

    @cached_property
    def members(self) -> tuple[NodeId, ...]:
        return tuple(self.record.members) if self.record else ()

    @property
    def begun(self) -> bool:
        """Whether the record was written since the job was last started (`Spec.first_generation`)."""
        return self.record is not None and (self.spec is None or self.record.number >= self.spec.first_generation)

    def all_acked(self, *kinds: AckKind) -> bool:
        return len(self.acks) == len(self.members) > 0 and all(ack.kind in kinds for ack in self.acks.values())

    def with_incidents(self, changed: Iterable[Incident]) -> World:
        """Return the same World with new and changed incidents in it."""
        changed = tuple(changed)
        if not changed:
            return self
        newest = {incident.id: incident for incident in (*self.incidents, *changed)}
        world = replace(self, incidents=tuple(newest.values()))
        world._said.update(self._said)
        return world

    def statuses(self) -> list[NodeStatus]:
        """Return the statuses of members that have reported in the record's generation."""
        return _statuses(self)

    def uncalm(self) -> dict[NodeId, NodeStatus]:
        """Return the statuses, of members or not, that report something rare, such as exits, stalls or rewinds. A detector that looks
        for those need not look at thousands of others."""
        return _uncalm(self)

    def uncalm_statuses(self) -> list[NodeStatus]:
        """Return those of `statuses` that report something rare."""
        return _of_members(self, self.uncalm())

    def held(self) -> dict[NodeId, str]:
        """Return, by member, what its ranks held at the last snapshots, if it reports that (`signals.Held`, `node_divergence`)."""
        return {node: told.held for node in self.members if (told := self.status.get(node)) and told.held}


def once(judge: Callable[Concatenate[World, P], T]) -> Callable[Concatenate[World, P], T]:
    """Cache what `judge` returns for a World and its arguments: a World never changes."""

    @wraps(judge)
    def known(world: World, *args: P.args, **kwargs: P.kwargs) -> T:
        asked = (judge, *args)
        if asked not in world._known:
            world._known[asked] = judge(world, *args, **kwargs)
        return world._known[asked]

    return known


def once_said(judge: Callable[[World], T]) -> Callable[[World], T]:
    """Cache what `judge` returns for the nodes' statuses. A World that `with_incidents` makes takes this cache over."""

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
