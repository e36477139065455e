"""Orders to rewind, from an operator or after replicas diverged: from the order's incident to its outcome. Pure."""

from __future__ import annotations

from dataclasses import replace

from ..errors import SnapshotError, UsageError
from ..incidents.lifecycle import next_id
from ..model.cluster_state import World
from ..model.generation import Decision, GenerationRecord, RewindOrder, answered
from ..model.incident import Incident
from ..model.request import Request
from ..model.state_machine import Phase
from ..model.types import OrderedBy, Step
from ..plan import recoverable_state
from ..plan.escalation import OBSERVE, RESTART_GROUP, REWIND_IN_PLACE
from ..plan.restart_history import unreadable
from ..plan.resume_point import common_steps
from ..text import formatting, sentences

SEEN_S = 30.0
"""Seconds within which every agent must see the snapshot to come back to. An agent lists an object store every five seconds."""


def pending(world: World) -> RewindOrder | None:
    """Return the rewind order that the ranks have not obeyed yet, or None."""
    waits = _waiting(world)
    return waits[0] if waits else None


def _waiting(world: World) -> tuple[RewindOrder, Incident] | None:
    """Return the order that `pending` returns, with its incident."""
    order = (world.record.rewind or world.record.begins) if world.record else None
    incident = next((i for i in world.incidents if order and i.id == order.incident), None)
    return (order, incident) if order and incident and incident.open and not incident.remedy else None


# -- orders of an operator --------------------------------------------------------------------------------------------------


def ordered(request: Request, world: World, now: float, reached: Step) -> Decision:
    """Return the next thing to do about an operator's rewind. reached: the newest step that any rank has finished."""
    record = world.present
    incident = next((i for i in world.incidents if i.signature == _signature(request)), None)
    if incident is None:
        if pending(world) is not None:
            return Decision()
        why = _cannot(request, world)
        if why:
            return answered(request, why, exit_code=UsageError.exit_code)
        return _order(request, world, record, now, reached)
    if incident.remedy:
        return answered(request, sentences.gone_back(incident), request.step)
    if not incident.open:
        return answered(request, incident.plan, exit_code=SnapshotError.exit_code)
    return given_up(world, now)


def _cannot(request: Request, world: World) -> str:
    """Return why the ranks cannot rewind as requested; empty: they can."""
    if request.left:
        return ""  # the order waits until all agents see the snapshot
    there = sorted(common_steps(recoverable_state.said(world), unreadable(world.incidents)))
    if request.step not in there:
        near = [*[s for s in there if s < request.step][-1:], *[s for s in there if s > request.step][:1]]
        known = (
            f"the nearest {'is' if len(near) == 1 else 'are'} {formatting.listed(near)}" if near else "there is none"
        )
        return f"no snapshot of step {request.step} is kept: {known}. Nothing was done"
    told = world.statuses()
    if not request.skip or (told and all(said.skips for said in told)):
        return ""
    if told and all(said.stepped_s for said in told):
        return "this script cannot skip data: its batches come neither from session.batches nor by session.data_step. Nothing was done"
    return "only after its first step is it known whether this script can skip data. Nothing was done; ask again then"


def _order(request: Request, world: World, record: GenerationRecord, now: float, reached: Step) -> Decision:
    ident = next_id(world)
    live = record.phase is not Phase.GATHER and not request.left
    incident = Incident(
        id=ident,
        generation=record.number,
        cause=OrderedBy.OPERATOR,
        rung=REWIND_IN_PLACE if live else RESTART_GROUP,
        summary=f"{request.by} ordered a rewind to step {request.step}",
        plan=sentences.ordered(request.step, request.skip, live),
        at_s=now,
        step_at_fault=reached,
        started=reached >= 0,
        signature=_signature(request),
        left=request.left,
    )
    order = RewindOrder(number=int(ident), to=request.step, skip=request.skip, left=request.left)
    return Decision(record=replace(record, rewind=order), incidents=(incident,), reason=incident.plan)


def _signature(request: Request) -> str:
    return f"{OrderedBy.OPERATOR}:{request.id}"


def given_up(world: World, now: float) -> Decision:
    """Withdraw an operator's order if ranks have reported that they cannot rewind as ordered, or if an agent does not see the snapshot to
    come back to."""
    waits = _waiting(world)
    if waits is None or waits[0].cause is not OrderedBy.OPERATOR:
        return Decision()
    order, incident = waits
    waits_s = now - incident.at_s if order.left and world.present.rewind else 0.0
    unseen = waits_s > SEEN_S and not recoverable_state.sees(world, order)
    if world.record is None or not (unseen or any(said.declined == order.number for said in world.statuses())):
        return Decision()
    why = f"not all agents have seen the snapshot of step {order.to} within {SEEN_S:.0f} s" if unseen else ""
    return Decision(record=replace(world.record, rewind=None), incidents=(_lost(order, incident, why),))


def lost(world: World) -> tuple[Incident, ...]:
    """Return the incident of the pending order, closed because the ranks can no longer obey it."""
    return tuple(_lost(*waits) for waits in [_waiting(world)] if waits)


def _lost(order: RewindOrder, incident: Incident, why: str = "") -> Incident:
    why = why or f"the snapshot of step {order.to} is no longer kept"
    return replace(incident, open=False, rung=OBSERVE, plan=f"{why}; the training continues without the rewind")


def coming_back(world: World) -> Incident | None:
    """Return the incident of an order to come back to a snapshot that an earlier order set aside, now that all agents see the snapshot. The
    order is obeyed by a restart, because the ranks' memory holds another lineage."""
    waits, record = _waiting(world), world.record
    if waits is None or record is None or record.rewind is None or not recoverable_state.sees(world, record.rewind):
        return None
    return waits[1]


# -- orders after a comparison of replicas ------------------------------------------------------------------------------------


def turn_back(world: World, incident: Incident, to: Step) -> Decision:
    """Order all ranks to rewind in place to step `to`, at which the replicas had not yet diverged."""
    order = RewindOrder(number=int(incident.id), to=to, cause=OrderedBy.COMPARISON)
    return Decision(record=replace(world.present, rewind=order), incidents=(incident,), reason=incident.plan)


def unheeded(world: World, now: float, patience_s: float) -> Incident | None:
    """Return the incident of diverged replicas, now to be answered by a restart, if the ranks cannot rewind in place or have not done so in
    time; else None."""
    waits = _waiting(world)
    if waits is None or waits[0].cause is not OrderedBy.COMPARISON:
        return None
    order, incident = waits
    cannot = any(s.declined == order.number or s.finished or s.stopped for s in world.statuses())
    if not cannot and now - incident.at_s <= patience_s:
        return None
    why = "could not" if cannot else f"did not within {formatting.seconds(patience_s)}"
    plan = f"the ranks were to rewind in place, but {why}: restart the worker group from before step {incident.onset}"
    return replace(incident, rung=RESTART_GROUP, plan=plan)


# -- orders of both kinds ---------------------------------------------------------------------------------------------------


def carried(world: World) -> tuple[RewindOrder | None, tuple[Incident, ...]]:
    """Return the pending order for the next generation, and its incident: the next ranks begin at the step of the order."""
    waits = _waiting(world)
    if waits is None:
        return None, ()
    order, incident = waits
    if order.cause is OrderedBy.COMPARISON:  # the incident's onset says where the next ranks may begin
        return None, (replace(incident, rung=RESTART_GROUP),)
    return order, (replace(incident, rung=RESTART_GROUP, plan=sentences.ordered(order.to, order.skip, live=False)),)
