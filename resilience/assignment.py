"""Who trains, and in which node rank: the nodes that are there → the members of the next generation. Pure.

A member keeps its node rank while it can: its memory holds the state of these ranks. A place that falls vacant goes to a spare; where there
is none, the job goes on with fewer nodes, of a number that is allowed; where none is, it waits for the node that is missing. It grows only
where nothing was wrong (`moving`): at a fault the ranks go on from memory, which is that of so many nodes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cache

from .errors import UsageError
from .machine import Phase
from .reports import NodeRecord
from .terms import NodeId
from .world import World


@dataclass(frozen=True, kw_only=True)
class NodesPolicy:
    number: str = ""
    """How many nodes train: N, MIN:MAX, or the numbers that will do as N,M,…; empty: what the command says with --nnodes."""
    spares: int = 0
    """Further nodes that are expected, to take the place of others."""
    join_s: float = 60.0
    """How long the first start waits for nodes that are expected, after the last one has joined, before it does with those that are
    there."""

    grow_after_s: float = 60.0
    """How long a node that has come back has to have been there until the job grows by it, which costs a restart."""

    def __post_init__(self) -> None:
        if self.grow_after_s < 0:
            raise UsageError(f"nodes.grow_after_s is {self.grow_after_s}; it cannot be negative")
        if self.spares < 0:
            raise UsageError(f"nodes.spares is {self.spares}; it cannot be negative")
        if self.join_s < 0:
            raise UsageError(f"nodes.join_s is {self.join_s}; it cannot be negative")


@dataclass(frozen=True, kw_only=True)
class Seats:
    members: dict[NodeId, str]
    """Node to agent instance, in the order of node ranks."""
    successors: dict[NodeId, NodeId] = field(default_factory=dict)
    """By the node that is gone: the spare that takes its place."""
    dropped: tuple[NodeId, ...] = ()
    """Gone, and the job goes on with fewer."""
    joined: tuple[NodeId, ...] = ()
    """Places that were not there before."""
    missed: tuple[NodeId, ...] = ()
    """Gone, and waited for."""
    at_work: bool = False
    """They are waited for although others would do: their ranks may be at work, and nobody who is there would end them."""


@cache
def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sorts `node-10` behind `node-9`. Kept, because thousands of names are sorted at every tick."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name))


class Mercy(IntEnum):
    """Who may train although it is not to, where the job cannot do without."""

    NONE = 0
    SHUT_OUT = 1
    """For faults of its own."""
    DRAINED = 2
    """And who is to leave, and waits until another one has come."""


def usable(world: World, now: float, mercy: Mercy = Mercy.NONE) -> dict[NodeId, NodeRecord]:
    """The nodes that may train. now: wall-clock seconds."""
    if mercy:
        world = replace(world, quarantine={})
    if mercy is Mercy.DRAINED and world.record:
        world = replace(world, record=replace(world.record, dismissed=()))
    dismissed = {*world.record.dismissed} if world.record else {}
    doubtful = {n for n, node in world.nodes.items() if node.fit or node.instance in dismissed or n in world.quarantine}
    left_out = {n for n in doubtful if unusable(world, n, now)}
    return {n: node for n, node in world.nodes.items() if n not in left_out}


def unusable(world: World, node: NodeId, now: float) -> str:
    """Why this node, which is there, is not to train; empty: it may."""
    if world.record and world.nodes[node].instance in world.record.dismissed:
        return "it is drained"
    if world.nodes[node].fit:
        return world.nodes[node].fit
    shut_out = world.quarantine.get(node)
    return shut_out.reason if shut_out and now < shut_out.until_s else ""


def first(world: World, now: float, policy: NodesPolicy) -> Seats | None:
    """The members of the first generation; None: not all are there. It begins with fewer than are expected when nobody has
    joined for some time."""
    assert world.spec
    here = usable(world, now)
    if not here:
        return None
    size = _fitting(world.spec.sizes, len(here))
    complete = len(world.nodes) >= max(world.spec.sizes) + world.spec.spares  # who is not to train has come, too
    quiet_s = now - max(world.since_s.get(node, 0.0) for node in here)
    if not size or not (complete or quiet_s > policy.join_s):
        return None
    return Seats(members={node: here[node].instance for node in sorted(here, key=natural)[:size]})


def proves(sizes: Sequence[int], spares: int, members: int) -> bool:
    """Whether, of the nodes that are expected, too few are left besides so many `members` for a generation of their own. Then members whose
    ranks finish steps know that nobody has begun anything without them, and end them for nobody (`agent/fencing.py`); and where more nodes
    have come than are expected, `again` sees to it. sizes: numbers of nodes that may train."""
    return max(sizes) + spares - members < min(sizes)


def elders(world: World) -> set[NodeId]:
    """The members of the last generation whose ranks may have begun; none where these are known to be dead."""
    record, spec = world.record, world.spec
    assert record
    assert spec
    gathers = record.phase is Phase.GATHER
    if record.number <= spec.given_up or (gathers and record.number == spec.first_generation):
        return set()
    return {*record.members}.difference(record.new).union(record.left) if gathers else {*record.members}


def needed(world: World) -> set[NodeId]:
    """The elders, where no generation may begin without any of them; empty: others may."""
    known = elders(world)
    return known if known and world.spec and proves(world.spec.sizes, world.spec.spares, len(known)) else set()


def again(world: World, now: float, settled_s: float | None = None) -> Seats:
    """The members of a generation that follows on another. settled_s: how long a node has to have been there for the job to grow by it;
    None: it does not grow, for what memory holds is of so many nodes, and of no use to another number. Where there are too few, there is
    mercy."""
    assert world.record
    found = without(world, now, settled_s)
    if not found.missed or found.at_work or not (world.quarantine or world.record.dismissed):
        return found
    for mercy in (Mercy.SHUT_OUT, Mercy.DRAINED):
        merciful = _again(world, usable(world, now, mercy), now, settled_s)
        if not merciful.missed:
            return merciful
    return found


def without(world: World, now: float, settled_s: float | None = None) -> Seats:
    """The same without mercy."""
    return _again(world, usable(world, now), now, settled_s)


def _again(world: World, here: Mapping[NodeId, NodeRecord], now: float, settled_s: float | None) -> Seats:
    assert world.spec
    assert world.record
    before = world.record.members
    known = elders(world)
    spares = sorted((node for node in here if node not in before), key=lambda node: (node not in known, natural(node)))
    gone = [node for node in before if node not in here]
    successors = dict(zip(gone, spares, strict=False))
    vacant, spares = gone[len(spares) :], spares[len(gone) :]
    places = [successors.get(node, node) for node in before]
    """Who is to have each, or, where it is vacant, who had it."""
    filled = [node for node in places if node in here]
    size = _fitting(world.spec.sizes, len(filled) + len(spares))
    if vacant and size == 0:
        kept = {node: here[node].instance if node in here else before[node] for node in places}
        return Seats(members=kept, successors=successors, missed=tuple(vacant))
    # Who has trained already goes before who would have to fetch the state.
    staying = {*sorted(filled, key=before.__contains__, reverse=True)[:size]}  # sorting keeps the order of those alike
    members = [node for node in filled if node in staying]
    settled = [node for node in spares if settled_s is not None and now - world.since_s.get(node, 0.0) >= settled_s]
    joined = tuple(settled[: _fitting(world.spec.sizes, len(members) + len(settled)) - len(members)])
    if (wanted := needed(world)) and wanted.isdisjoint((*members, *joined)):
        waiting = {node: here[node].instance if node in here else i for node, i in before.items()}
        return Seats(members=waiting, missed=tuple(gone), at_work=True)
    return Seats(
        members={node: here[node].instance for node in (*members, *joined)},
        successors={node: s for node, s in successors.items() if s in staying},
        dropped=tuple(node for node, s in zip(before, places, strict=True) if s not in staying),
        joined=joined,
    )


def _fitting(sizes: Sequence[int], there: int) -> int:
    """The largest number of nodes that is allowed, and there; 0: none is."""
    return max((size for size in sizes if size <= there), default=0)
