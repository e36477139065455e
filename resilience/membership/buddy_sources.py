"""Finds the copies in other nodes' memory that nodes can use, and the source of each node's part (the copy that it fetches). Pure.

All nodes copy the snapshots of the same steps (the marked steps), each node to its holder (`buddy_placement.holders`). If a node's memory
is lost, the node that gets its node rank starts from the copy. All others start from the same step in their own memory, because they keep
marked steps.

    own memory of the members, statuses' copies ──`fetchable`──▶ what each could fetch ──`resume_point.choose`──▶ snapshot ──▶ its sources
"""

from __future__ import annotations

from collections.abc import Mapping

from ..model.cluster_state import World, once_said
from ..model.generation import GenerationRecord, Source
from ..model.signals import Snapshot
from ..model.types import NodeId, Step
from . import buddy_placement


@once_said
def own(world: World) -> dict[NodeId, tuple[Step, ...]]:
    """Return, by present member, the steps in its memory that belong to its present ranks. A node cannot use steps of other ranks."""
    members = world.record.members if world.record else {}
    count = len(members)
    found: dict[NodeId, tuple[Step, ...]] = {}
    for rank, (node, instance) in enumerate(members.items()):
        said, present = world.status.get(node), world.nodes.get(node)
        if said and present and present.instance == instance:
            found[node] = said.memory_steps if not said.seat or said.seat == (rank, count) else ()
    return found


@once_said
def fetchable(world: World) -> dict[NodeId, dict[Snapshot, Source]]:
    """Return, by member, the snapshots that its memory lacks and whose copy another member holds, each with its source.

    A copy counts only if a member has the same snapshot in its own memory: the same step of the same lineage. A snapshot that no member has
    in its own memory must come from disk.
    """
    members, held = world.members, own(world)
    kept = {node: world.status[node].remembered() if steps else set() for node, steps in held.items()}
    if len(held) == len(members) and len({frozenset(each) for each in kept.values()}) == 1:
        return {}  # no member lacks a snapshot that another member has
    known = set[Snapshot]().union(*kept.values())
    found: dict[NodeId, dict[Snapshot, Source]] = {}
    for node in held:
        for copy in world.status[node].copies:
            owner = members[copy.node_rank] if copy.nodes == len(members) > copy.node_rank else node
            snapshot = (copy.generation, copy.rewinds, copy.step)
            refused = owner in held and snapshot in world.status[owner].unfetched
            deaf = owner in world.nodes and not world.nodes[owner].copies_port
            if owner != node and snapshot in known - kept.get(owner, set()) and not (refused or deaf):
                source = Source(holder=node, generation=copy.generation, rewinds=copy.rewinds)
                found.setdefault(owner, {})[snapshot] = source
    return found


def apart(world: World) -> dict[NodeId, NodeId]:
    """Return the holders of those members whose holder is not the member half the ring away, because of the racks."""
    members = world.members
    labels = {node: record.labels for node in members if (record := world.nodes.get(node)) and record.labels}
    if not labels or len(members) < 2:
        return {}
    found, count = buddy_placement.holders(members, labels), len(members)
    return {
        node: found[node]
        for at, node in enumerate(members)
        if found[node] != members[buddy_placement.opposite(at, count)]
    }


def holder(record: GenerationRecord, node: NodeId) -> NodeId | None:
    """Return the node that holds the copies of a member's snapshots; None: `node` is no member, or the only one."""
    members = [*record.members]
    if node not in record.members or len(members) < 2:
        return None
    return record.holders.get(node) or members[buddy_placement.opposite(members.index(node), len(members))]


def words(sources: Mapping[NodeId, Source]) -> str:
    """Return a text on which node's part comes from which holder; empty: there are no sources."""
    few = ", ".join(f"{node}'s part from {source.holder}" for node, source in [*sources.items()][:3])
    more = len(sources) - 3
    return f", {few}{f' and {more} more' if more > 0 else ''}" if sources else ""
