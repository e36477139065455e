"""Makes the World (a picture of the whole job) from the job's values in the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from ..model.cluster_state import World
from ..model.generation import GenerationRecord, Quarantine
from ..model.incident import Incident, in_order
from ..model.node import Ack, Death, NodeRecord, NodeStatus, Spec
from ..model.request import Answer, Request
from ..model.types import NodeId
from .keys import Keys
from .parsed_cache import Values

T = TypeVar("T")


def read_world(keys: Keys, values: Mapping[str, bytes]) -> World:
    """Return the World from all values under the job's prefix."""
    return world_of(keys, Values(values))


def world_of(keys: Keys, values: Values) -> World:
    """Return the World from values, most of which were parsed before."""
    record = values.one(keys.generation, GenerationRecord)
    acks = values.under(f"{keys.acks}{record.number}/", Ack) if record else {}
    members: Mapping[NodeId, str] = record.members if record else {}
    nodes, dead = _by_node(values.under(keys.nodes, NodeRecord)), values.under(keys.deaths, Death)
    return World(
        spec=values.one(keys.spec, Spec),
        record=record,
        nodes={name: node for name, node in nodes.items() if node.instance not in dead} if dead else nodes,
        dead=dead,
        status=_by_node(values.under(keys.statuses, NodeStatus)),
        acks={node: ack for node, ack in _by_node(acks).items() if members.get(node) == ack.instance},
        incidents=in_order(values.under(keys.incidents, Incident).values()),
        requests=tuple(replace(found, id=name) for name, found in values.under(keys.requests, Request).items()),
        answers=values.under(keys.answers, Answer),
        quarantine=_by_node(values.under(keys.quarantines, Quarantine)),
        leader=values.text(keys.leader),
    )


def _by_node(found: dict[str, T]) -> dict[NodeId, T]:
    return found  # type: ignore[return-value]
