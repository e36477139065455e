"""The role of each node in the job, from the World: it trains, stands by, is gone, or must not train. Pure."""

from __future__ import annotations

from enum import StrEnum

from ..model.cause import Cause
from ..model.cluster_state import World
from ..model.types import NodeId
from . import quarantine, rank_assignment


class Role(StrEnum):
    TRAINS = "trains"
    STANDS_BY = "stands by"
    CUT_OFF = "cut off"
    """The node does not reach etcd, but still trains (`reachability`)."""
    GONE = "gone"
    """The node's agent is gone, and its ranks died with it."""
    DRAINED = "drained"
    SHUT_OUT = "shut out"
    NOT_FIT = "not fit"


def roles(world: World, now: float) -> dict[NodeId, Role]:
    """Return the members' roles, sorted by node rank, then those of other present or past nodes, sorted by name. now: wall-clock
    seconds."""
    members = world.members if world.begun else ()
    others = sorted({*world.nodes, *world.status} - {*members}, key=rank_assignment.natural)
    return {node: _role(world, node, node in members, now) for node in (*members, *others)}


def away(world: World, node: NodeId, role: Role) -> bool:
    """Whether everything that the node last reported is gone, except what is on disk."""
    if not world.begun:  # earlier agents reported it, not the present ones
        return True
    return role is Role.GONE or (role is Role.DRAINED and node not in world.nodes)


def leader(world: World) -> NodeId | None:
    return next((node for node, here in world.nodes.items() if here.instance == world.leader), None)


def _role(world: World, node: NodeId, member: bool, now: float) -> Role:
    here, said, record = world.nodes.get(node), world.status.get(node), world.record
    if here is None or (member and record and here.instance != record.members[node]):
        if member and any(i.open and i.cause == Cause.CUT_OFF and node in i.nodes for i in world.incidents):
            return Role.CUT_OFF
        return Role.DRAINED if said and said.drained else Role.GONE
    if record and here.instance in record.dismissed:
        return Role.DRAINED
    if here.fit:
        return Role.NOT_FIT
    if node in quarantine.in_force(world, now) and not member:  # a quarantined member still trains if the job needs it
        return Role.SHUT_OUT
    return Role.TRAINS if member else Role.STANDS_BY
