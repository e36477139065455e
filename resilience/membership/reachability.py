"""Finds the members that do not reach etcd, but still train. Pure.

An expired lease means that an agent is dead, or only cut off from etcd. In each step all ranks exchange data, and an agent's ranks die with
it. So each step that the other members finish shows that a cut-off node's ranks are alive. Replacing a node that trains would end all ranks
for nothing. So a cut-off node counts as present while steps complete:

    no member reports that a rank ended, and steps do not stop
      and  the newest step is younger than half a lease           a dead agent has been dead for longer than that, because
                                                                  agents renew a lease every third of its lifetime
      or   it was finished long after the node's last status      an agent reports until it dies, and no step is finished after
                                                                  its death

If all members are gone, no node reports whether they finish steps. If the nodes that are present may not start without them
(`rank_assignment.needed`), the members count as present, and they continue when they are back. The members' leases expire one after the
other. So the members whose leases expire first also count as present, while the other members have sent nothing for half a lease.

To count a cut-off node as present does not delay the detection of a node's death. A cut-off node reads no orders. The leader notices this
when the node does not obey an order (`rewind_orders.unheeded`).
"""

from __future__ import annotations

from ..model.cluster_state import World
from ..model.node import NodeRecord, NodeStatus
from ..model.state_machine import Phase
from ..model.types import NodeId
from .rank_assignment import needed

WORDS = 2.0
"""A node is silent if it sends no status for this many times its usual interval between two statuses."""
STRIDES = 3.0
"""Ranks count as stopped if a step takes this many times as long as the longest recent step."""


def cut_off(world: World, now: float, lease_s: float) -> tuple[NodeId, ...]:
    """Return the members that are cut off from etcd and count as present. now: wall-clock seconds; lease_s: a lease's lifetime in seconds,
    0: not known."""
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
    """Whether no node reports that the members train or do not, and the nodes that are present may not start without them. Every member is
    gone, or has been silent for so long that its lease may expire next."""
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
    """Return the present nodes, and the nodes in `away`. Of the latter only the identity is known."""
    members, ranks = world.present.members, world.spec.ranks if world.spec else 0
    return {**world.nodes, **{n: NodeRecord(instance=members[n], host=n, pid=0, ranks=ranks) for n in away}}


def _trains(status: NodeStatus) -> bool:
    ended = status.exits or status.stalls or status.finished or status.stopped
    return status.pulse_s > 0 and not ended


def _outlives(newest_s: float, last: NodeStatus | None, generation: int) -> bool:
    """Whether steps were finished long after that node's last status. Clocks that differ by seconds can make this wrong: a death is then
    detected only once steps take too long."""
    if last is None or last.generation != generation or not last.often_s:
        return False
    return newest_s - last.at_s > WORDS * last.often_s
