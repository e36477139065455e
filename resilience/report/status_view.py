"""Makes the output of `status` from the World: sentences, and a table row for each node. Pure; no program parses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..decide.operator_requests import waiting
from ..detect import node_divergence
from ..incidents import membership_changes
from ..membership import quarantine, rank_assignment
from ..membership.node_roles import Role, away, leader, roles
from ..model.cluster_state import World
from ..model.generation import Seats
from ..model.node import NodeStatus
from ..model.state_machine import Phase
from ..plan import recoverable_state
from ..text import formatting, sentences
from . import explain

COLUMNS = ("node", "role", "ranks alive", "step", "in memory", "on disk", "started", "said")
_DOING = {Phase.GATHER: "gathering", Phase.LAUNCH: "starting", Phase.RUN: "training"}
_LONG_S = 120.0
"""From this age in seconds on, a status's time of day is shown instead of its age."""


def headline(world: World, now: float) -> str:
    """Return what the job is doing, and which event made its generation begin; empty: nothing is known. now: wall-clock seconds."""
    record = world.record
    if (waits := awaited(world, now)) or record is None or not world.begun:
        return waits
    if record.phase not in _DOING:
        return f"generation {record.number}, {record.phase}: {record.reason}"
    doing = f"generation {record.number}, {_DOING[record.phase]}"
    first = world.spec is not None and record.number == world.spec.first_generation
    return doing if first else f"{doing}; it began after: {record.reason}"


def lines(world: World, now: float, when: Callable[[float], str]) -> list[str]:
    """Return the sentences above the table. now: wall-clock seconds; when: formats wall-clock seconds as a time."""
    said, record = [headline(world, now)], world.record
    if len(world.nodes) > 1:
        said.append(f"{leader(world) or 'no node'} leads")
    if missed := membership_changes.missed(world, now):
        said.append(sentences.seats(Seats(members={}, missed=missed)))
    barred = rank_assignment.left(world, now)
    if record and record.phase is Phase.GATHER and record.pauses(now):
        sooner = ", or earlier if another number of nodes is available" if len(world.members) in barred else ""
        said.append(f"starts fail: the next one is {when(record.opened_s + record.pause_s)}{sooner}")
    elif barred:
        said.append(
            f"starts on {' and on '.join(map(str, barred))} nodes have failed: the job tries them again an hour later"
        )
    if record and record.paused:
        told = world.statuses()
        all_wait = told and all(status.paused for status in told)
        said.append(
            "paused: all ranks wait for the command mt-resilient resume"
            if all_wait
            else "a pause is ordered; not all ranks wait yet"
        )
    if record and record.moving:
        said.append(f"the ranks wait until their state is on disk, then continue on other nodes: {record.moving}")
    for request in waiting(world):
        said.append(f"ordered by {request.by}, {when(request.at_s)}, and not done yet: {sentences.wish(request)}")
    part = roles(world, now) if world.quarantine else {}
    for node, entry in quarantine.in_force(world, now).items():
        shut_out = f"is in quarantine until {when(entry.until_s)}: {entry.reason}"
        if part.get(node) is Role.TRAINS:
            said.append(f"{node} {shut_out}; it still trains, because the job needs it")
        else:
            said.append(f"{node} {shut_out}; to end this now: mt-resilient readmit {node}")
    said += [here.fit for here in world.nodes.values() if here.fit]
    members = [world.status[node] for node in world.members if node in world.status]
    if certified := [status.certified_steps[-1] for status in members if status.certified_steps]:
        said.append(f"newest certified snapshot: step {min(certified)}")
    said.append(compared(*node_divergence.compared(world.held())))
    if any(status.observes for status in members):
        said.append("observing: the program does nothing about faults")
    return [line for line in said if line]


def rows(world: World, now: float, when: Callable[[float], str]) -> list[tuple[str, ...]]:
    """Return the table's cells for each node, as in `COLUMNS`. If a node's agent is gone, the node's ranks and memory are not shown."""
    found = []
    for node, role in roles(world, now).items():
        said = world.status.get(node)
        there = ("–",) * 6 if said is None else _told(said, away(world, node, role), now, when)
        found.append((node, str(role), *there))
    return found


def _told(said: NodeStatus, gone: bool, now: float, when: Callable[[float], str]) -> tuple[str, ...]:
    steps = f"{said.min_step}" if said.min_step == said.max_step else f"{said.min_step}–{said.max_step}"
    ago_s = now - said.at_s
    return (
        "–" if gone else str(said.alive),
        steps if said.max_step >= 0 else "–",
        "–" if gone else _steps(said.memory_steps),
        _steps(said.durable_steps[-3:]),
        "–" if gone else explain.launched(said.launch),
        f"{max(0.0, ago_s):.1f} s ago" if ago_s < _LONG_S else when(said.at_s),  # clocks may differ
    )


def _steps(kept: tuple[int, ...]) -> str:
    return ", ".join(map(str, kept)) or "–"


def awaited(world: World, now: float, join_s: float | None = None) -> str:
    """Return for which nodes the job waits before it begins, or begins again; empty: it does not wait. now: wall-clock seconds. join_s:
    seconds that it still waits when enough nodes are there; None: not known."""
    spec = world.spec
    if unseen := recoverable_state.unseen(world):
        return f"waiting for the storage of the snapshots, which has not answered {formatting.listed(unseen)} yet"
    if spec is None or max(spec.sizes) == 1:
        return ""
    if _unheard(world):
        return f"waiting for {formatting.listed(world.members)}, which do not reach etcd: {sentences.AT_WORK}"
    if world.record and world.begun and not _short(world, now):
        return ""
    unfit = [node for node, here in world.nodes.items() if here.fit]
    there = (
        f"{formatting.listed(sorted(world.nodes, key=str))} {'is' if len(world.nodes) == 1 else 'are'} here"
        if world.nodes
        else "no node is here"
    )
    spares = f" and {formatting.count(spec.spares, 'spare')}" if spec.spares else ""
    not_fit = f", of which {formatting.listed(unfit)} cannot be used" if unfit else ""
    sizes = rank_assignment.allowed(world, now)
    enough = len(world.nodes) - len(unfit) >= min(sizes)
    how_long = "some time (nodes.join_s)" if join_s is None else f"{join_s:.0f} s"
    until = f"; it begins with them when no other joins for {how_long}" if enough and not world.begun else ""
    return f"waiting for nodes: {there}{not_fit}; the job expects {' or '.join(formatting.few(sizes))}{spares}{until}"


def _short(world: World, now: float) -> bool:
    """Whether the present number of nodes is not allowed: too few have come since the command was given again, or the script does not start
    with that number."""
    record = world.record
    return record is not None and not record.over and not rank_assignment.will_do(world, record.members, now)


def _unheard(world: World) -> bool:
    """Whether all members are cut off and the job must wait for them. If so, `awaited` reports this to a node that joins."""
    cut = {
        n
        for i in world.incidents
        if i.open and i.cause == "cut_off" and world.record and i.generation == world.record.number
        for n in i.nodes
    }
    return bool(world.members) and cut.issuperset(world.members) and world.nodes.keys().isdisjoint(world.members)


def compared(replicas: Sequence[Sequence[str]], own: Sequence[str]) -> str:
    """Return a sentence on which nodes' replicas are compared with each other, and which nodes are not compared; empty: no nodes are.
    replicas: the compared nodes, by model; own: nodes that hold something else."""
    if not replicas:
        return ""
    who = (
        formatting.listed(replicas[0])
        if len(replicas) == 1
        else f"{sum(map(len, replicas)):,} nodes, of {len(replicas)} models"
    )
    left_out = f"; not {formatting.listed(own)}, which hold{'s' if len(own) == 1 else ''} something else" if own else ""
    return f"replicas are compared across nodes: {who}{left_out}"
