"""One immutable picture of the job: everything in the store, read at one moment, parsed. Judgement starts from here, every time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from .keys import Keys
from .orders import GenerationRecord, Incident
from .signals import Ack, AckKind, Answer, NodeId, NodeRecord, NodeStatus, Quarantine, Request, Spec
from .wire import loads


@dataclass(frozen=True, kw_only=True)
class World:
    spec: Spec | None
    record: GenerationRecord | None
    nodes: Mapping[NodeId, NodeRecord]
    """Whose agents live: their leases do, and no neighbour has seen them dead."""
    status: Mapping[NodeId, NodeStatus]
    """Of the record's members, and only what was said in the record's generation (or, while gathering, in any)."""
    acks: Mapping[NodeId, Ack]
    """For the record's generation, by the instances that it names."""
    incidents: tuple[Incident, ...]
    requests: tuple[Request, ...]
    """Answered ones too, the oldest first."""
    answers: Mapping[str, Answer] = field(default_factory=dict)
    """By request."""
    quarantine: Mapping[NodeId, Quarantine] = field(default_factory=dict)

    @property
    def members(self) -> tuple[NodeId, ...]:
        return tuple(self.record.members) if self.record else ()

    def all_acked(self, *kinds: AckKind) -> bool:
        return bool(self.members) and all(n in self.acks and self.acks[n].kind in kinds for n in self.members)

    def with_incidents(self, changed: Iterable[Incident]) -> World:
        """The same, with new and changed incidents in it."""
        newest = {incident.id: incident for incident in (*self.incidents, *changed)}
        return replace(self, incidents=tuple(newest.values()))

    def statuses(self) -> list[NodeStatus]:
        """Of members that have reported in the record's generation."""
        number = self.record.number if self.record else 0
        return [s for n, s in self.status.items() if n in self.members and s.generation == number]


def read_world(keys: Keys, entries: Mapping[str, bytes]) -> World:
    """The World from all values under the job's prefix."""

    ordered = sorted(entries.items())

    def under(prefix: str) -> list[tuple[str, bytes]]:
        return [(key.removeprefix(prefix), value) for key, value in ordered if key.startswith(prefix)]

    record = loads(GenerationRecord, entries[keys.generation]) if keys.generation in entries else None
    acks: dict[NodeId, Ack] = {}
    if record:
        for name, value in under(f"{keys.acks}{record.number}/"):
            ack = loads(Ack, value)
            if record.members.get(NodeId(name)) == ack.instance:
                acks[NodeId(name)] = ack
    nodes = {name: loads(NodeRecord, value) for name, value in under(keys.nodes)}
    return World(
        spec=loads(Spec, entries[keys.spec]) if keys.spec in entries else None,
        record=record,
        nodes={NodeId(name): node for name, node in nodes.items() if keys.death(node.instance) not in entries},
        status={NodeId(name): loads(NodeStatus, value) for name, value in under(keys.statuses)},
        acks=acks,
        incidents=tuple(loads(Incident, value) for _, value in under(keys.incidents)),
        requests=tuple(replace(loads(Request, value), id=name) for name, value in under(keys.requests)),
        answers={name: loads(Answer, value) for name, value in under(keys.answers)},
        quarantine={NodeId(name): loads(Quarantine, value) for name, value in under(keys.quarantines)},
    )
