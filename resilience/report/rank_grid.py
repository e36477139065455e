"""What each rank does now, as `status --watch` draws it: a row for each node, one word for each rank. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ..membership.node_roles import away, roles
from ..model.cluster_state import World
from ..model.generation import GenerationRecord
from ..model.node import NodeStatus
from ..model.types import Rank

TRAINS, PAUSED, FINISHED, STOPS, NO_RANKS = "trains", "paused", "finished", "stops", "no ranks"
GONE, SILENT, SLOW = "gone", "silent", "slow"
ODD = (GONE, SILENT, SLOW)
"""Words for single ranks of a node whose other ranks do what `NodeRow.phase` says."""


@dataclass(frozen=True, kw_only=True)
class NodeRow:
    node: str
    role: str
    step: int
    """-1: none."""
    phase: str
    """What the node's ranks do: a phase of the recovery (`incident.PHASES`), or one of the words above."""
    ranks: tuple[str, ...]
    """By local rank: `phase`, or one of ODD."""

    @property
    def calm(self) -> bool:
        return {self.phase, *self.ranks} <= {TRAINS, NO_RANKS}


def rows(world: World, now: float) -> list[NodeRow]:
    """Return the rows. Nodes that do not train come first. now: wall-clock seconds."""
    ranked = {node: at for at, node in enumerate(world.members if world.begun else ())}
    found = []
    for node, role in roles(world, now).items():
        said, record = world.status.get(node), world.record
        there = said is not None and record is not None and node in ranked and not away(world, node, role)
        phase = _phase(said, record) if there and said and record else NO_RANKS
        number = world.nodes[node].ranks if node in world.nodes else len(said.pids) if said else 0
        first = ranked.get(node, 0) * number
        odd = _odd(said) if there and said else {}
        ranks = tuple(odd.get(Rank(first + local), phase) for local in range(number)) if there else ()
        found.append(NodeRow(node=node, role=str(role), step=said.max_step if said else -1, phase=phase, ranks=ranks))
    return sorted(found, key=lambda row: row.calm)


def _odd(said: NodeStatus) -> dict[Rank, str]:
    """Return what is the matter with single ranks, by rank."""
    slow = {each.rank: SLOW for each in said.stragglers}
    return slow | {each.rank: SILENT for each in said.stalls} | {each.rank: GONE for each in said.exits}


def _phase(said: NodeStatus, record: GenerationRecord) -> str:
    if said.generation != record.number:
        return STOPS
    for name, at_s in (
        ("start", said.attached_s),
        ("build", said.built_s),
        ("restore", said.restored_s),
        ("step", said.stepped_s),
    ):
        if not at_s:
            return name
    if said.finished or said.stopped:
        return FINISHED
    if said.paused:
        return PAUSED
    return "replay" if not said.replayed_s and said.max_step < record.replay_until else TRAINS
