"""Chooses the members of the next generation and their node ranks, from the nodes that are present. Pure.

A member keeps its node rank while it can, because its memory holds the state of these ranks. A spare takes a lost member's node rank.
Without a spare, the job continues with fewer nodes if that number is allowed. If the number is not allowed, the job waits for the missing
node. The job grows only if there was no fault (`planned_move`): after a fault the ranks resume from memory, which fits only the same number
of nodes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from ..errors import UsageError
from ..model.cluster_state import World, once
from ..model.generation import Seats
from ..model.node import NodeRecord
from ..model.state_machine import Phase
from ..model.types import NodeId

MOST_NODES = 100_000
"""The most nodes that a job may have. A larger number is probably a typing error."""
TRUE_S = 3600.0
"""Seconds for which a number of nodes counts as one on which the script does not start. After this time the number is allowed again,
because a network or file server may have been down."""


@dataclass(frozen=True, kw_only=True)
class NodesPolicy:
    """How many nodes train."""

    number: str = ""
    """How many nodes train: `N`, `MIN:MAX`, or a list of the allowed numbers `N,M,…`. Empty: as torchrun's `--nnodes`
    says. Short: `--nodes`."""
    spares: int = 0
    """How many additional nodes stand by to take the place of lost ones. Short: `--spares`."""
    join_s: float = 60.0
    """How many seconds the first start still waits for missing nodes after the last node has joined. After this time,
    the job starts with the nodes that are present, if their number is allowed."""

    grow_after_s: float = 60.0
    """How many seconds a returned node must be present before the job grows by it. Growing costs a restart, so a node that comes and goes
    should not cause one each time."""
    simumax_model: str = ""
    """SimuMax's description of the model, a JSON file. With this file and `simumax_system`, SimuMax is asked for a layout on each number of
    nodes that cannot hold Megatron's layout as the script has it. Empty: the job does not use these numbers."""
    simumax_system: str = ""
    """SimuMax's description of the machine, a JSON file: its devices' memory and speed, and its networks."""

    def __post_init__(self) -> None:
        if self.grow_after_s < 0:
            raise UsageError(f"nodes.grow_after_s is {self.grow_after_s}; it cannot be negative")
        if self.spares < 0:
            raise UsageError(f"nodes.spares is {self.spares}; it cannot be negative")
        if self.join_s < 0:
            raise UsageError(f"nodes.join_s is {self.join_s}; it cannot be negative")
        if bool(self.simumax_model) != bool(self.simumax_system):
            raise UsageError("nodes.simumax_model and nodes.simumax_system belong together; give both, or none")


def sizes(text: str) -> tuple[int, ...]:
    """Return the numbers of nodes that a job may train on, ascending: `4`, `2:4` (2, 3 or 4) or `2,4` (2 or 4). Raises UsageError."""
    least, colon, most = text.partition(":")
    parts = text.split(",") if not colon else [least, most]
    if all(part.isdecimal() and 0 < int(part) <= MOST_NODES for part in parts):
        numbers = sorted(map(int, parts))
        if not colon:
            return tuple(dict.fromkeys(numbers))
        if int(least) <= int(most):
            return tuple(range(numbers[0], numbers[1] + 1))
    raise UsageError(
        f"--nodes {text} is not valid: write a number, MIN:MAX, or allowed numbers such as 2,4,8, up to {MOST_NODES}. Nothing was started"
    )


@cache
def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Return a key that sorts `node-10` after `node-9`. The key is cached, because every tick sorts thousands of names."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name))


def usable(world: World, now: float) -> dict[NodeId, NodeRecord]:
    """Return the nodes that may train. now: wall-clock seconds."""
    dismissed, shut_out = _dismissed(world), {n for n in world.quarantine if _shut_out(world, n, now)}
    return {
        n: node
        for n, node in world.nodes.items()
        if not node.fit and node.instance not in dismissed and n not in shut_out
    }


def unusable(world: World, node: NodeId, now: float) -> str:
    """Return why this node must not train, although it is present; empty: it may train."""
    if world.record and world.nodes[node].instance in world.record.dismissed:
        return "it is drained"
    if world.nodes[node].fit:
        return world.nodes[node].fit
    return _shut_out(world, node, now)


def _dismissed(world: World) -> set[str]:
    return {*world.record.dismissed} if world.record else set()


def _shut_out(world: World, node: NodeId, now: float) -> str:
    shut_out = world.quarantine.get(node)
    return shut_out.reason if shut_out and now < shut_out.until_s else ""


def _with_mercy(world: World, here: Mapping[NodeId, NodeRecord], now: float) -> dict[NodeId, NodeRecord]:
    """Return `here` with as many more nodes as the job lacks to train. Quarantined nodes come first, then drained ones that wait for
    another node; in each group, members come first. Nodes that failed preflight are never added."""
    assert world.spec
    dismissed = _dismissed(world)
    others = [node for node, record in world.nodes.items() if node not in here and not record.fit]
    others.sort(key=lambda node: (world.nodes[node].instance in dismissed, node not in world.members, natural(node)))
    lacking = max(0, min(allowed(world, now)) - len(here))
    return {**here, **{node: world.nodes[node] for node in others[:lacking]}}


@once
def allowed(world: World, now: float) -> tuple[int, ...]:
    """Return the allowed numbers of nodes, without those on which the script does not start (`left`). If too few nodes are present for any
    other number, the excluded numbers are retried in turn."""
    if world.spec is None:
        return ()
    sizes, barred = world.spec.sizes, left(world, now)
    if not barred:
        return sizes
    there = sum(not node.fit and not _shut_out(world, name, now) for name, node in world.nodes.items())
    fit = tuple(size for size in sizes if size not in barred)
    if any(size <= there for size in fit):
        return fit
    return next(((size,) for size in barred if size in sizes and size <= there), fit or sizes)


@once
def left(world: World, now: float) -> tuple[int, ...]:
    """Return the numbers of nodes on which the script has failed to start since the job was last started, the oldest finding first. If the
    script later trained on a number on which it had failed, the number was not the reason, so none is returned. Once the script trains,
    failed starts older than `TRUE_S` do not count either. now: wall-clock seconds."""
    if world.spec is None or world.record is None:
        return ()
    since = max(world.spec.first_generation, world.spec.given_up + 1)
    found, failed = dict[int, float](), set[int]()
    for incident in world.incidents:
        if incident.generation < since or incident.would is not None:
            continue
        if incident.unfit:
            found.pop(incident.unfit, None)
            found[incident.unfit] = incident.at_s
        if not incident.started:
            failed.add(incident.size)
        elif incident.size in failed:
            found, failed = {}, set()
        else:
            found = {size: at_s for size, at_s in found.items() if incident.at_s - at_s < TRUE_S}
    if any(status.stepped_s for status in world.statuses()):
        if len(world.members) in failed:
            return ()
        found = {size: at_s for size, at_s in found.items() if now - at_s < TRUE_S}
    return () if world.record.trained in found else (*found,)


def first(world: World, now: float, policy: NodesPolicy) -> Seats | None:
    """Return the members of the first generation; None: not all nodes are there. Once no node has joined for `join_s`, the job begins with
    fewer nodes than expected. After `join_s`, the job may also use nodes that have been in quarantine since before its last start."""
    assert world.spec
    here = usable(world, now)
    if not here:
        return None
    if now - max(world.since_s.get(node, 0.0) for node in world.nodes) > policy.join_s:
        here = _with_mercy(world, here, now)
    size = _fitting(world.spec.sizes, len(here))
    complete = len(world.nodes) >= world.spec.nodes  # nodes that must not train are counted too
    quiet_s = now - max(world.since_s.get(node, 0.0) for node in here)
    if not size or not (complete or quiet_s > policy.join_s):
        return None
    return Seats(members={node: here[node].instance for node in sorted(here, key=natural)[:size]})


def proves(sizes: Sequence[int], spares: int, members: int) -> bool:
    """Whether the expected nodes besides `members` are too few for a generation of their own. If they are too few, members whose ranks
    finish steps know that no generation has begun without them, and let the ranks continue (`agent/peers/fencing.py`). If more nodes have
    come than expected, `again` ensures that no generation begins without such a member. sizes: the allowed numbers of nodes."""
    return max(sizes) + spares - members < min(sizes)


def elders(world: World) -> set[NodeId]:
    """Return the members of the last generation whose ranks may have started; empty: these ranks are known to be dead."""
    record, spec = world.record, world.spec
    assert record
    assert spec
    gathers = record.phase is Phase.GATHER
    if record.number <= spec.given_up or (gathers and record.number == spec.first_generation):
        return set()
    return {*record.members}.difference(record.new).union(record.left) if gathers else {*record.members}


def needed(world: World) -> set[NodeId]:
    """Return the elders (`elders`) if the next generation must have at least one of them; empty: it needs none."""
    known = elders(world)
    return known if known and world.spec and proves(world.spec.sizes, world.spec.spares, len(known)) else set()


def again(world: World, now: float, settled_s: float | None = None, struck: Collection[NodeId] = ()) -> Seats:
    """Return the members of a generation that follows another. settled_s: seconds for which a node must have been present before the job
    grows by it. None, at a fault: the job does not grow, because memory fits only the same number of nodes. At a fault, a drained node that
    is still present remains a member, with its memory, until the ranks train (`planned_move`). A drained node does not remain a member if
    it was `struck` before its ranks made a step, or if starts fail. If nodes are too few, other present nodes are added (`_with_mercy`)."""
    here = usable(world, now)
    if settled_s is None and world.present.dismissed and not world.present.idle:
        here |= {node: record for node, record in _leaving(world, now).items() if node not in struck}
    found = _again(world, here, now, settled_s)
    if not found.missed and will_do(world, found.members, now):
        return found
    more = _one_at_work(world, here) if found.at_work else _with_mercy(world, here, now)
    merciful = _again(world, more, now, None)
    return merciful if will_do(world, merciful.members, now) and not merciful.missed else found


def _one_at_work(world: World, here: Mapping[NodeId, NodeRecord]) -> dict[NodeId, NodeRecord]:
    """Return `here` with one of the `needed` nodes, even if it is quarantined or drained, because that node ends its old ranks. A node
    whose ranks may still train is preferred."""
    members, there, wanted = world.present.members, world.nodes, needed(world)
    elders = [node for node in members if node in wanted and node in there and not there[node].fit]
    elders.sort(key=lambda node: there[node].instance != members[node])
    return {**here, **{node: there[node] for node in elders[:1]}}


def _leaving(world: World, now: float) -> dict[NodeId, NodeRecord]:
    """Return the drained members that are healthy and whose agent has not restarted."""
    dismissed, there = _dismissed(world), world.nodes
    drained = [n for n, i in world.present.members.items() if i in dismissed and n in there and there[n].instance == i]
    return {n: there[n] for n in drained if not there[n].fit and not _shut_out(world, n, now)}


def without(world: World, now: float, settled_s: float | None = None) -> Seats:
    """Return the members of the next generation, chosen only from usable nodes."""
    return _again(world, usable(world, now), now, settled_s)


def _again(world: World, here: Mapping[NodeId, NodeRecord], now: float, settled_s: float | None) -> Seats:
    assert world.spec
    before = world.present.members
    known = elders(world)
    spares = sorted((node for node in here if node not in before), key=lambda node: (node not in known, natural(node)))
    gone = [node for node in before if node not in here]
    successors = dict(zip(gone, spares, strict=False))
    vacant, spares = gone[len(spares) :], spares[len(gone) :]
    places = [successors.get(node, node) for node in before]
    """For each node rank: the node that gets it or, if no node does, the node that had it."""
    filled = [node for node in places if node in here]
    size = _fitting(allowed(world, now), len(filled) + len(spares))
    if size == 0:
        kept = {node: here[node].instance if node in here else before[node] for node in places}
        return Seats(members=kept, successors=successors, missed=tuple(vacant))
    # Nodes that have trained are preferred to nodes that would have to fetch the state.
    staying = {
        *sorted(filled, key=before.__contains__, reverse=True)[:size]
    }  # a stable sort keeps node ranks in sequence
    members = [node for node in filled if node in staying]
    settled = [node for node in spares if _settled(world, node, now, settled_s)]
    joined = tuple(settled[: _fitting(allowed(world, now), len(members) + len(settled)) - len(members)])
    if (wanted := needed(world)) and wanted.isdisjoint((*members, *joined)):
        there = world.nodes  # quarantined nodes too: they start again with their present agents
        waiting = {node: there[node].instance if node in there else i for node, i in before.items()}
        return Seats(members=waiting, missed=tuple(gone), at_work=True)
    return Seats(
        members={node: here[node].instance for node in (*members, *joined)},
        successors={node: s for node, s in successors.items() if s in staying},
        dropped=tuple(node for node, s in zip(before, places, strict=True) if s not in staying),
        joined=joined,
    )


def _settled(world: World, node: NodeId, now: float, settled_s: float | None) -> bool:
    """Whether the job may grow by `node`. The job may always grow if its present number of nodes is no longer allowed, because memory is
    then of no use."""
    if not will_do(world, world.present.members, now):
        return True
    return settled_s is not None and now - world.since_s.get(node, 0.0) >= settled_s


def will_do(world: World, members: Collection[NodeId], now: float) -> bool:
    """Whether this number of members is allowed. After all agents died, an operator may have given the command with other numbers."""
    return world.spec is None or len(members) in allowed(world, now)


def _fitting(sizes: Sequence[int], there: int) -> int:
    """Return the largest allowed number of nodes that is at most `there`; 0: there is none."""
    return max((size for size in sizes if size <= there), default=0)
