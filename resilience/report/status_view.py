"""What `status` shows of a job: World → sentences, and a row for each node. Pure; nobody parses them."""

from __future__ import annotations

from collections.abc import Callable

from ..decide import node_exclusion
from ..decide.operator_requests import waiting
from ..detect import node_divergence
from ..incidents import membership_changes
from ..membership import rank_assignment
from ..membership.node_roles import Role, away, leader, roles
from ..membership.rank_assignment import Seats
from ..model.cluster_state import World
from ..model.node import NodeStatus
from ..model.state_machine import Phase
from ..text import sentences
from . import explain

COLUMNS = ("node", "role", "ranks alive", "step", "in memory", "on disk", "started", "said")
_DOING = {Phase.GATHER: "gathering", Phase.LAUNCH: "starting", Phase.RUN: "training"}
_LONG_S = 120.0
"""So long ago, the time of day says more."""


def headline(world: World, now: float) -> str:
    """What the job is doing, and since what; empty: nothing is known of it. now: wall-clock seconds."""
    record = world.record
    if (awaited := sentences.awaited(world, now)) or record is None or not world.begun:
        return awaited
    if record.phase not in _DOING:
        return f"generation {record.number}, {record.phase}: {record.reason}"
    doing = f"generation {record.number}, {_DOING[record.phase]}"
    first = world.spec is not None and record.number == world.spec.first_generation
    return doing if first else f"{doing}; it began after: {record.reason}"


def lines(world: World, now: float, when: Callable[[float], str]) -> list[str]:
    """What is to be known before the table. now: wall-clock seconds; when: makes a time of such seconds."""
    said, record = [headline(world, now)], world.record
    if len(world.nodes) > 1:
        said.append(f"{leader(world) or 'nobody'} leads")
    if missed := membership_changes.missed(world, now):
        said.append(sentences.seats(Seats(members={}, missed=missed)))
    barred = rank_assignment.left(world, now)
    if record and record.phase is Phase.GATHER and record.pauses(now):
        sooner = ", or as soon as another number of nodes can be had" if len(world.members) in barred else ""
        said.append(f"starts fail: the next one is {when(record.opened_s + record.pause_s)}{sooner}")
    elif barred:
        said.append(
            f"starts on {' and on '.join(map(str, barred))} nodes have failed: an hour later they are tried again"
        )
    if record and record.paused:
        told = world.statuses()
        all_wait = told and all(status.paused for status in told)
        said.append(
            "paused: all ranks wait, until: mt-resilient resume"
            if all_wait
            else "a pause is ordered; not all ranks wait yet"
        )
    if record and record.moving:
        said.append(f"the ranks wait until their state is on disk, to go on on other nodes: {record.moving}")
    for request in waiting(world):
        said.append(f"ordered by {request.by}, {when(request.at_s)}, and not done yet: {sentences.wish(request)}")
    part = roles(world, now) if world.quarantine else {}
    for node, entry in node_exclusion.in_force(world, now).items():
        shut_out = f"is shut out until {when(entry.until_s)}: {entry.reason}"
        if part.get(node) is Role.TRAINS:
            said.append(f"{node} {shut_out}; it trains, for the job cannot do without it")
        else:
            said.append(f"{node} {shut_out}; to have it back before: mt-resilient readmit {node}")
    said += [here.fit for here in world.nodes.values() if here.fit]
    members = [world.status[node] for node in world.members if node in world.status]
    if certified := [status.certified_steps[-1] for status in members if status.certified_steps]:
        said.append(f"newest certified snapshot: step {min(certified)}")
    said.append(sentences.compared(*node_divergence.compared(world.held())))
    if any(status.observes for status in members):
        said.append("observing: nothing is done about faults")
    return [line for line in said if line]


def rows(world: World, now: float, when: Callable[[float], str]) -> list[tuple[str, ...]]:
    """The cells of `COLUMNS`. What has gone with its agent is not shown as if it were there."""
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
