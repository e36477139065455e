"""One immutable picture of the job: everything in the store, read at one moment, parsed. Judgement starts from here, every time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .keys import Keys
from .orders import GenerationRecord, Incident
from .signals import Ack, AckKind, Answer, NodeId, NodeRecord, NodeStatus, Request, Spec
from .wire import loads


@dataclass(frozen=True, kw_only=True)
class World:
    spec: Spec | None
    record: GenerationRecord | None
    nodes: Mapping[NodeId, NodeRecord]
    status: Mapping[NodeId, NodeStatus]
    """Of the record's members, and only what was said in the record's generation (or, while gathering, in any)."""
    acks: Mapping[NodeId, Ack]
    """For the record's generation, by the instances that it names."""
    incidents: tuple[Incident, ...]
    requests: tuple[Request, ...]
    """Answered ones too, the oldest first."""
    answers: Mapping[str, Answer] = field(default_factory=dict)
    """By request."""

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
        number, members = (self.record.number, self.record.members) if self.record else (0, {})
        return [s for n, s in self.status.items() if n in members and s.generation == number]


def anew(cls: Any, key: str, value: bytes) -> Any:
    return loads(cls, value)


def read_world(keys: Keys, entries: Mapping[str, bytes], parse: Callable[[Any, str, bytes], Any] = anew) -> World:
    """The World from all values under the job's prefix. parse: (class, key, value) → record; `Parsed` for who looks again and again."""

    ordered = sorted(entries)

    def under(prefix: str, cls: Any) -> Iterable[tuple[str, Any]]:
        first = bisect_left(ordered, prefix)
        for key in ordered[first : bisect_left(ordered, prefix[:-1] + chr(ord(prefix[-1]) + 1), first)]:
            yield key[len(prefix) :], parse(cls, key, entries[key])

    def one(key: str, cls: Any) -> Any:
        return parse(cls, key, entries[key]) if key in entries else None

    record = one(keys.generation, GenerationRecord)
    acks = under(f"{keys.acks}{record.number}/", Ack) if record else ()
    return World(
        spec=one(keys.spec, Spec),
        record=record,
        nodes={NodeId(name): found for name, found in under(keys.nodes, NodeRecord)},
        status={NodeId(name): found for name, found in under(keys.statuses, NodeStatus)},
        acks={NodeId(name): ack for name, ack in acks if record.members.get(name) == ack.instance},
        incidents=tuple(found for _, found in under(keys.incidents, Incident)),
        requests=tuple(replace(found, id=name) for name, found in under(keys.requests, Request)),
        answers=dict(under(keys.answers, Answer)),
    )
