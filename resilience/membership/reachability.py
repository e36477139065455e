"""Members that do not reach etcd, and train all the same: World → who they are. Pure.

A lease that is over says that an agent is dead, or cut off from etcd alone. A step is an exchange of all ranks, so each one that the
other members finish says that its ranks are alive; and an agent's ranks die with it. To give the place of one that trains away would
end all ranks for nothing: it counts as present while steps are made:

    no word of any rank's end, and steps do not stop
      and  the newest step is younger than half a lease           who is dead has been for longer: leases are renewed at a third
      or   it was finished long after the node's own last word    who is dead was heard to the last

Of members that are all gone nobody says whether they make steps. Where nobody who is there may begin without them
(`rank_assignment.needed`), they count as present: they go on where they are once they are back. Their leases end one after the other: so do
the first ones, while nothing has come from the others for half a lease.

So the death of a node is seen as early as without this. That nobody hears orders on a node that is cut off shows where one is not obeyed
(`rewind_orders.unheeded`).
"""

from __future__ import annotations

from ..model.cluster_state import World
from ..model.node import NodeRecord, NodeStatus
from ..model.state_machine import Phase
from ..model.types import NodeId
from .rank_assignment import needed

WORDS = 2.0
"""Of the times between two words of a node, so many may be missing until it is silent."""
STRIDES = 3.0
"""A step may take so many times as long as the longest of the last ones until ranks stand still."""


def cut_off(world: World, now: float, lease_s: float) -> tuple[NodeId, ...]:
    """now: wall-clock seconds; lease_s: how long a lease lives, 0: not known."""
    record = world.record
    if record is None or record.phase is not Phase.RUN:
        return ()
    absent = [n for n, i in record.members.items() if n not in world.nodes and i not in world.dead]
    if not absent:
        return ()
    here = [n for n, i in record.members.items() if n in world.nodes and world.nodes[n].instance == i]
    if unseen(world, now, lease_s):
        return tuple(absent)
    said = [world.status[n] for n in here if n in world.status and world.status[n].generation == record.number]
    if not said or len(said) < len(here) or not all(_trains(status) for status in said):
        return ()
    newest = max(status.pulse_s for status in said)
    recent = 0 <= now - newest < lease_s / 2
    patience_s = max(max(STRIDES * status.stride_s, WORDS * status.often_s) for status in said)
    steady = max(status.at_s - status.pulse_s for status in said) <= patience_s
    return tuple(n for n in absent if recent or (steady and _outlives(newest, world.status.get(n), record.number)))


def unseen(world: World, now: float, lease_s: float) -> bool:
    """Whether nobody says if the members train, and nobody who is there may begin without them: all are gone, or so silent that their
    leases may end next."""
    record = world.record
    if record is None or world.spec is None:
        return False
    silent = all(
        _mute(world, n, now, lease_s) if n in world.nodes and world.nodes[n].instance == i else n not in world.nodes
        for n, i in record.members.items()
    )
    return silent and world.dead.keys().isdisjoint(record.members.values()) and bool(needed(world))


def _mute(world: World, node: NodeId, now: float, lease_s: float) -> bool:
    return 0 < lease_s / 2 < now - world.heard_s.get(node, now)


def standing_in(world: World, away: tuple[NodeId, ...]) -> dict[NodeId, NodeRecord]:
    """The nodes that are there, with those that are `away`: of these no more is known than who they are."""
    assert world.record
    members, ranks = world.record.members, world.spec.ranks if world.spec else 0
    return {**world.nodes, **{n: NodeRecord(instance=members[n], host=n, pid=0, ranks=ranks) for n in away}}


def _trains(status: NodeStatus) -> bool:
    ended = status.exits or status.stalls or status.finished or status.stopped
    return status.pulse_s > 0 and not ended


def _outlives(newest_s: float, last: NodeStatus | None, generation: int) -> bool:
    """Whether steps were made long after that node's last word. Clocks that are apart by seconds can mislead this: then it takes as long
    as steps may, until a death is seen."""
    if last is None or last.generation != generation or not last.often_s:
        return False
    return newest_s - last.at_s > WORDS * last.often_s
