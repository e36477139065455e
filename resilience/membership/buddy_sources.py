"""Which copies in other nodes' memory are of use, and where each node's lies. Pure.

All nodes copy the same steps, the marked ones, each to its holder (`buddy_placement.holders`). Where a node's memory is lost, whoever has
its node rank now starts from the copy, and all others from the same step of their own memory: they keep what is marked.

    own memory of the members, statuses' copies ──`fetchable`──▶ what each could have ──`resume_point.choose`──▶ the step ──▶ its sources
"""

from __future__ import annotations

from collections.abc import Mapping

from ..model.cluster_state import World, once_said
from ..model.generation import GenerationRecord, Source
from ..model.node import Copy
from ..model.types import NodeId, Step
from . import buddy_placement


@once_said
def own(world: World) -> dict[NodeId, tuple[Step, ...]]:
    """By member that is there: what its own memory holds of the ranks that it has now. What it holds of others is of no use to it."""
    members = world.record.members if world.record else {}
    count = len(members)
    found: dict[NodeId, tuple[Step, ...]] = {}
    for rank, (node, instance) in enumerate(members.items()):
        said, present = world.status.get(node), world.nodes.get(node)
        if said and present and present.instance == instance:
            found[node] = said.memory_steps if not said.seat or said.seat == (rank, count) else ()
    return found


@once_said
def fetchable(world: World) -> dict[NodeId, dict[Step, Source]]:
    """By member: the steps that it lacks in memory while another member holds its part of them, and which one does.

    A copy counts where it is of the same course as what the others hold of that step: they have the same generation and number of
    rewinds in their stamps. What nobody holds itself is left to the disk.
    """
    members, held = world.members, own(world)
    if len(held) == len(members) and len({*held.values()}) == 1:
        return {}  # nobody lacks what another one has
    lacking: list[tuple[NodeId, NodeId, Copy]] = []
    """Owner, holder, and what it holds."""
    for node in held:
        for copy in world.status[node].copies:
            owner = members[copy.node_rank] if copy.nodes == len(members) > copy.node_rank else node
            if owner != node and copy.step not in held.get(owner, ()):
                lacking.append((owner, node, copy))
    courses: dict[Step, set[tuple[int, ...]]] = {copy.step: set() for _, _, copy in lacking}
    for node, steps in held.items() if lacking else ():
        for step, course in zip(steps, world.status[node].courses, strict=False):
            if step in courses:
                courses[step].add(course)
    found: dict[NodeId, dict[Step, Source]] = {}
    for owner, node, copy in lacking:
        refused = owner in held and (copy.generation, copy.rewinds, copy.step) in world.status[owner].unfetched
        deaf = owner in world.nodes and not world.nodes[owner].copies_port
        if not (refused or deaf) and courses[copy.step] == {(copy.generation, copy.rewinds)}:
            source = Source(holder=node, generation=copy.generation, rewinds=copy.rewinds)
            found.setdefault(owner, {})[copy.step] = source
    return found


def apart(world: World) -> dict[NodeId, NodeId]:
    """Of the members, those whose holder is another than the one half the ring away, for it is of another rack."""
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
    """Who holds the copies of a member's snapshots; None for one that trains alone."""
    members = [*record.members]
    if node not in record.members or len(members) < 2:
        return None
    return record.holders.get(node) or members[buddy_placement.opposite(members.index(node), len(members))]


def words(sources: Mapping[NodeId, Source]) -> str:
    """Whose part comes from where, for the story."""
    few = ", ".join(f"{node}'s part from {source.holder}" for node, source in [*sources.items()][:3])
    more = len(sources) - 3
    return f", {few}{f' and {more} more' if more > 0 else ''}" if sources else ""
