"""Incidents of changes of nodes: lost nodes, nodes that replace them, nodes that come back, and planned moves. Pure.

The loss of a node is one incident, from the first fault of its peers to the last replayed step, however many generations open meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..membership import rank_assignment
from ..model.cause import Cause
from ..model.cluster_state import World
from ..model.generation import Seats
from ..model.incident import Incident
from ..model.state_machine import Phase
from ..model.types import NodeId, Step
from ..plan import recoverable_state
from ..plan.escalation import REPLACE_NODE, REPLAN, RESTARTS
from ..text import sentences
from .lifecycle import next_id


def moved(world: World, seats: Seats, why: str, now: float, reached: Step) -> Incident:
    """Return the incident of a planned move: other nodes train from here on, and nothing was wrong."""
    plan = "the ranks waited until their state was on disk; the next ranks begin with it"
    if not recoverable_state.saved(world):
        plan = "the ranks waited, but their state did not reach the disk; the next ranks begin with an older one"
    return Incident(
        id=next_id(world),
        generation=world.present.number,
        cause=Cause.MOVED,
        rung=_rung(seats),
        summary=why,
        plan=plan,
        at_s=world.present.moving_s or now,
        step_at_fault=reached,
        started=True,
        size=len(world.members),
        signature=f"{Cause.MOVED}:{world.present.number}",
    )


def bereft(world: World, seats: Seats, said: str) -> tuple[Incident, ...]:
    """Return the incident of a restart that waited for a lost node, and now continues with another node or with that node's new agent.
    said: a text that names these agents."""
    last = _waiting(world)
    gone = [node for node in (*seats.successors, *seats.dropped) if node not in world.nodes]
    told = (_of_the_gone(i, gone) for i in last)
    return tuple(replace(i, rung=_rung(seats, i.rung), plan=f"{i.plan}; {said}") for i in told)


def missed_told(world: World, missed: Sequence[NodeId]) -> tuple[Incident, ...]:
    """Return the incident of a restart that waits because no node can take the place of a lost one. missed: the lost nodes."""
    for last in _waiting(world):
        after = _of_the_gone(last, missed)
        if after != last:
            return (replace(after, plan=f"{after.plan}; {sentences.seats(Seats(members={}, missed=tuple(missed)))}"),)
    return ()


def missed(world: World, now: float) -> tuple[NodeId, ...]:
    """Return the lost members whose place no node can take: the job waits for them."""
    record = world.record
    if record is None or record.phase is not Phase.GATHER or record.members.keys() <= world.nodes.keys():
        return ()
    return tuple(node for node in rank_assignment.again(world, now).missed if node not in world.nodes)


def _waiting(world: World) -> list[Incident]:
    """Return the incident of the present restart, if there is one."""
    return [i for i in world.incidents if i.open and i.rung in RESTARTS][-1:]


def _of_the_gone(incident: Incident, gone: Sequence[NodeId]) -> Incident:
    """Return the incident, changed into the incident of the lost nodes. Peers of a lost node raise exceptions or hang before its lease
    expires. So the incident that such peers have opened belongs to the lost nodes."""
    news = [node for node in gone if incident.cause != Cause.AGENT_LOST or node not in incident.nodes]
    if not news or incident.cause in (Cause.ORDERED, Cause.MOVED):
        return incident
    lost = sentences.lost_agents(news)
    if incident.cause == Cause.AGENT_LOST:
        return replace(incident, evidence=(*incident.evidence, lost), nodes=(*incident.nodes, *news))
    return replace(
        incident,
        cause=Cause.AGENT_LOST,
        summary=lost,
        evidence=(lost, f"seen before, as a consequence: {incident.summary}", *incident.evidence[1:]),
        signature=Cause.AGENT_LOST,
        nodes=tuple(news),
    )


def _rung(seats: Seats, otherwise: int = REPLAN) -> int:
    return REPLACE_NODE if seats.successors else REPLAN if seats.dropped or seats.joined else otherwise
