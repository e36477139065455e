"""The World, one immutable picture of the job: everything in the store, read at one moment and parsed. Every decision is based on it."""

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
    """Nodes whose agent is alive: its lease is valid, and no neighbour has reported it as dead."""
    status: Mapping[NodeId, NodeStatus]
    """The last status of each node, also of nodes that have left, and from earlier generations; `statuses` skips both."""
    acks: Mapping[NodeId, Ack]
    """The members' acknowledgements for the record's generation. Each acknowledgement comes from the agent instance (start of an agent)
    that the record names."""
    incidents: tuple[Incident, ...]
    requests: tuple[Request, ...]
    """All requests of operators, the oldest first, including answered requests."""
    answers: Mapping[str, Answer] = field(default_factory=dict)
    """The answers, by the request's id."""
    quarantine: Mapping[NodeId, Quarantine] = field(default_factory=dict)
    since_s: Mapping[NodeId, float] = field(default_factory=dict)
    """For each node that may become a member: when the leader first saw it, by the leader's own wall clock."""
    heard_s: Mapping[NodeId, float] = field(default_factory=dict)
    """For each node: when the leader read the node's last status, by the leader's own wall clock. For the node's first status: when the
    node wrote the status, if that is earlier."""
    dead: Mapping[str, Death] = field(default_factory=dict)
    """Reports of dead agents, by the dead agent's instance."""
    leader: str = ""
    """The leader's instance; empty: there is no leader."""

    _known: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Results that `once` has cached."""
    _said: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Results that `once_said` has cached."""

    @cached_property
    def members(self) -> tuple[NodeId, ...]:
        return tuple(self.record.members) if self.record else ()

    @property
    def present(self) -> GenerationRecord:
        """The generation record, where there must be one."""
        assert self.record
        return self.record

    @property
    def begun(self) -> bool:
        """Whether the generation record was written since the job was last started (`Spec.first_generation`)."""
        return self.record is not None and (self.spec is None or self.record.number >= self.spec.first_generation)

    def all_acked(self, *kinds: AckKind) -> bool:
        return len(self.acks) == len(self.members) > 0 and all(ack.kind in kinds for ack in self.acks.values())

    def with_incidents(self, changed: Iterable[Incident]) -> World:
        """Return this World with the incidents of `changed` added or replaced."""
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
        """Return the statuses of all nodes, members or not, that report something rare, such as exits, stalls or rewinds. So a detector of
        rare events need not read thousands of ordinary statuses."""
        return _uncalm(self)

    def uncalm_statuses(self) -> list[NodeStatus]:
        """Return the members' statuses, as in `statuses`, that report something rare."""
        return _of_members(self, self.uncalm())

    def held(self) -> dict[NodeId, str]:
        """Return, for each member that reports it, the fingerprints of its ranks at the last snapshots (`signals.Held`,
        `node_divergence`)."""
        return {node: told.held for node in self.members if (told := self.status.get(node)) and told.held}


def once(judge: Callable[Concatenate[World, P], T]) -> Callable[Concatenate[World, P], T]:
    """Cache the result of `judge` for each World and the other arguments. Caching is safe, because a World never changes."""

    @wraps(judge)
    def known(world: World, *args: P.args, **kwargs: P.kwargs) -> T:
        asked = (judge, *args)
        if asked not in world._known:
            world._known[asked] = judge(world, *args, **kwargs)
        return world._known[asked]

    return known


def once_said(judge: Callable[[World], T]) -> Callable[[World], T]:
    """Cache the result of `judge`, which must not depend on incidents. A World made by `with_incidents` inherits this cache."""

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
