"""Derives from the World the event to look up in the table of `state_machine`, and the verdict and plan behind the event. Pure."""

from __future__ import annotations

from collections.abc import Set

from ..detect.registry import suspect
from ..diagnose.root_cause import Verdict, judge, settled
from ..membership import quarantine, rank_assignment
from ..model.cluster_state import World
from ..model.node import AckKind
from ..model.state_machine import Event, Phase
from ..model.types import NodeId
from ..plan import recoverable_state
from ..plan.escalation import Plan, may_resume, plan
from ..plan.restart_history import Size, unreadable
from . import node_exclusion, observe_only, planned_move
from .operator_requests import leaving
from .policy import Policy
from .rewind_orders import pending

STORAGE_S = 120.0
"""Seconds that storage may take to list its snapshots before a job that needs them ends. A large bucket takes minutes."""


def event_of(world: World, now: float, policy: Policy) -> tuple[Event | None, Verdict | None, Plan | None]:
    """Return the event, verdict and plan that follow from the World. A request to stop takes precedence over a verdict: a job that is to
    end is not restarted."""
    ending = world.record is not None and world.record.over
    if leaving(world, now):
        return calm(world, now, policy) if ending else (Event.STOP, None, None)
    verdict = judge(suspect(world))
    if verdict and not settled(verdict, _unheard(world), now):
        return None, None, None
    if verdict:
        in_place = (
            _all_at_work(world) and not verdict.consequences and recoverable_state.sound(world, verdict.onset) >= 0
        )
        size, trained = len(world.members), world.record.trained if world.record else 0
        answer = plan(
            verdict,
            recoverable_state.step_reached(world),
            recoverable_state.newest(world),
            node_exclusion.unforgiven(world),
            policy.recovery,
            in_place=in_place,
            shut_out=_out(world, now, verdict),
            size=Size(
                now=size,
                trained=trained if world.spec and trained in world.spec.sizes else 0,
                left=size in rank_assignment.left(world, now),
                alive=len(world.nodes),
            ),
        )
        if answer.event is Event.FAULT or not ending:  # otherwise, the job is ending already
            return answer.event, verdict, answer
    return calm(world, now, policy)


def _out(world: World, now: float, verdict: Verdict) -> Set[NodeId]:
    """Return the quarantined nodes, except those that will train in spite of the quarantine because the job needs them."""
    shut_out = quarantine.in_force(world, now).keys()
    return shut_out - rank_assignment.again(world, now, struck=verdict.early).members.keys() if shut_out else shut_out


def _unheard(world: World) -> bool:
    """Whether there are several members, and at least one has not yet reported how its ranks ended."""
    told = sum(bool(status.exits) for status in world.uncalm_statuses())
    return told < len(world.members) > 1


def calm(world: World, now: float, policy: Policy) -> tuple[Event | None, Verdict | None, Plan | None]:
    """Return event, verdict and plan if there is no verdict to answer."""
    if policy.observe and (end := observe_only.ended(world)):
        return end.event, None, end
    statuses = world.statuses()
    ending = world.record is not None and world.record.phase is Phase.ENDING
    if ending and world.record and all(_gone(world, node, instance) for node, instance in world.record.members.items()):
        return Event.GONE, None, None
    on_the_move = world.record is not None and world.record.moving
    if _others_wanted(world, now) or (on_the_move and planned_move.move(world, now, policy)[0] is planned_move.Move.GO):
        return Event.MEMBERS, None, None
    if len(statuses) == len(world.members) and all(s.finished or s.stopped for s in statuses):
        return Event.FINISHED, None, None
    if world.all_acked(AckKind.RUNNING):
        return Event.RUNNING, None, None
    # Each member has reported its snapshots before READY, and reports again if an older status arrived late.
    ready = world.all_acked(AckKind.READY) and len(statuses) == len(world.members) and not world.present.pauses(now)
    there = all(node in world.nodes for node in world.members)
    if not (ready and there and rank_assignment.will_do(world, world.members, now)):
        return None, None, None
    if policy.observe:
        return Event.READY, None, None
    stop = may_resume(
        recoverable_state.point(world),
        recoverable_state.said(world),
        bool(unreadable(world.incidents)),
        recoverable_state.onset(world),
    )
    ready_s = max((world.acks[node].at_s for node in world.members if node in world.acks), default=now)
    if stop and recoverable_state.unseen(world) and now - ready_s < STORAGE_S:
        return None, None, None
    return (stop.event if stop else Event.READY), None, stop


def _others_wanted(world: World, now: float) -> bool:
    """Whether another node, or the node's new agent, can now take the place of a member that is lost or quarantined."""
    record = world.record
    if record is None or record.phase is not Phase.GATHER:
        return False
    here = rank_assignment.usable(world, now)
    there = all(node in here and here[node].instance == instance for node, instance in record.members.items())
    if there and rank_assignment.will_do(world, record.members, now):
        return False
    seats = rank_assignment.again(world, now)
    return [*seats.members.items()] != [*record.members.items()] and rank_assignment.will_do(world, seats.members, now)


def _all_at_work(world: World) -> bool:
    """Whether all ranks are in their training loop, and no rewind order is pending."""
    told, record = world.statuses(), world.record
    busy = record is None or record.phase is not Phase.RUN or pending(world) is not None
    return not busy and len(told) == len(world.members) and all(s.stepped_s and not s.exits for s in told)


def _gone(world: World, node: NodeId, instance: str) -> bool:
    """Whether nothing of this generation is left on `node`: the node has acknowledged this, or its agent is gone and the ranks died with
    it."""
    present = world.nodes.get(node)
    if present is None or present.instance != instance:
        return True
    return node in world.acks and world.acks[node].kind is AckKind.ENDED
