"""Which copies in other nodes' memory are of use, and where each node's lies. Pure.

All nodes copy the same steps, the marked ones, each to its holder (`buddies.holders`). Where a node's memory is lost, whoever has its node
rank now starts from the copy, and all others from the same step of their own memory: they keep what is marked.

    own memory of the members, statuses' copies ──`fetchable`──▶ what each could have ──`stability.choose`──▶ the step ──▶ its sources
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from . import buddies
from .orders import GenerationRecord, Source
from .signals import NodeId, Step
from .world import World


def own(world: World) -> dict[NodeId, tuple[Step, ...]]:
    """By member that is there: what its own memory holds of the ranks that it has now. What it holds of others is of no use to it."""
    members = world.members
    there = {n: s for n, s in world.status.items() if n in members and n in world.nodes}
    seats = {n: ((), (rank, len(members))) for rank, n in enumerate(members)}
    present = {n: s for n, s in there.items() if world.record and world.nodes[n].instance == world.record.members[n]}
    return {n: present[n].memory_steps if present[n].seat in seats[n] else () for n in members if n in present}


def fetchable(world: World) -> dict[NodeId, dict[Step, Source]]:
    """By member: the steps that it lacks in memory while another member holds its part of them, and which one does.

    A copy counts where it is of the same course as what the others hold of that step: they have the same generation and number of
    rewinds in their stamps. What nobody holds itself is left to the disk.
    """
    members, held = [*world.members], own(world)
    courses: dict[Step, set[tuple[int, ...]]] = defaultdict(set)
    for node, steps in held.items():
        for step, course in zip(steps, world.status[node].courses, strict=False):
            courses[step].add(course)
    found: dict[NodeId, dict[Step, Source]] = {}
    for node in held:
        for copy in world.status[node].copies:
            owner = members[copy.node_rank] if copy.nodes == len(members) > copy.node_rank else node
            lacks = owner != node and copy.step not in held.get(owner, ())
            refused = owner in held and copy.step in world.status[owner].unfetched
            deaf = owner in world.nodes and not world.nodes[owner].copies_port
            if lacks and not (refused or deaf) and courses.get(copy.step) == {(copy.generation, copy.rewinds)}:
                source = Source(holder=node, generation=copy.generation, rewinds=copy.rewinds)
                found.setdefault(owner, {})[copy.step] = source
    return found


def apart(world: World) -> dict[NodeId, NodeId]:
    """Of the members, those whose holder is another than the one half the ring away, for it is of another rack."""
    members = [*world.members]
    labels = {node: record.labels for node in members if (record := world.nodes.get(node)) and record.labels}
    if not labels:
        return {}
    return {node: held for node, held in buddies.holders(members, labels).items() if held != _opposite(members, node)}


def holder(record: GenerationRecord, node: NodeId) -> NodeId | None:
    """Who holds the copies of a member's snapshots; None for one that trains alone."""
    members = [*record.members]
    if node not in record.members or len(members) < 2:
        return None
    return record.holders.get(node) or _opposite(members, node)


def _opposite(members: Sequence[NodeId], node: NodeId) -> NodeId:
    return members[(members.index(node) + len(members) // 2) % len(members)]


def words(sources: Mapping[NodeId, Source]) -> str:
    """Whose part comes from where, for the story."""
    few = ", ".join(f"{node}'s part from {source.holder}" for node, source in [*sources.items()][:3])
    more = len(sources) - 3
    return f", {few}{f' and {more} more' if more > 0 else ''}" if sources else ""
