"""Incidents of findings on which the ranks do not act: a spike after which they wait for the loss to come back, or any fault while they
only observe. Pure."""

from __future__ import annotations

from dataclasses import replace

from ..diagnose import alternatives
from ..inprocess.loss_spike import Finding
from ..inprocess.rewind_ladder import LadderPolicy
from ..model.cause import Kind
from ..model.cluster_state import World
from ..model.incident import Incident
from ..model.rewind import Remedy
from ..model.signals import Sighting
from ..model.types import Step
from ..plan.escalation import OBSERVE, RESTART_GROUP, REWIND_IN_PLACE, STOP
from ..text import sentences
from . import lifecycle


def sightings_told(world: World, policy: LadderPolicy, observe: bool) -> tuple[Incident, ...]:
    """Return incidents of what the ranks have found: new incidents, and incidents that are now closed. The incident of a watch is closed
    when the ranks report the watch's end, or have started again. If the ranks only observe a fault, its incident is closed some steps after
    the fault was last seen."""
    known = {incident.signature: incident for incident in world.incidents}
    changed: list[Incident] = []
    reached = min((status.min_step for status in world.statuses()), default=Step(-1))
    for sighting in {s.ordinal: s for status in world.statuses() for s in status.sightings}.values():
        signature = f"{_SIGNATURE}{sighting.generation}:{sighting.ordinal}"
        incident = known.get(signature)
        if incident is None:
            fresh = sum(new.signature not in known for new in changed)
            new = _of_sighting(sighting, signature, lifecycle.next_id(world, fresh), observe)
            changed.append(replace(new, weighed=tuple(alternatives.agreement(world.statuses()))))
        elif incident.open and (end := _end(sighting, reached, policy)):
            changed.append(replace(incident, open=False, evidence=(*incident.evidence, end)))
    present = world.record.number if world.record else 0
    left = (i for i in world.incidents if i.open and i.signature.startswith(_SIGNATURE) and i.generation < present)
    return (*changed, *(replace(i, open=False, evidence=(*i.evidence, _STARTED_AGAIN)) for i in left))


_SIGNATURE = "sighting:"
_STARTED_AGAIN = "the ranks have started again since"


def _end(told: Sighting, reached: int, policy: LadderPolicy) -> str:
    """Return how the finding has ended; empty: it has not ended."""
    if told.outcome:
        return sentences.watch_ended(told.outcome, told.last)
    if told.remedy != Remedy.WAIT and reached >= told.last + policy.settled_steps:
        return f"it was last seen at step {told.last}"
    return ""


def _of_sighting(told: Sighting, signature: str, ident: str, observe: bool) -> Incident:
    found = Finding(kind=Kind(told.cause), onset=told.onset, seen=told.seen, value=told.value, expected=told.expected)
    if told.remedy == Remedy.WAIT:
        rung, plan = OBSERVE, sentences.waits(told.to)
    elif told.remedy == Remedy.LEAVE_ALONE:
        rung, plan = OBSERVE, sentences.LEFT_ALONE
    elif told.remedy == Remedy.GIVE_UP:
        rung, plan = STOP, "end the job: the ranks had tried every remedy before"
    elif told.to < 0:
        rung, plan = RESTART_GROUP, "restart the worker group: there is no snapshot to rewind to in place"
    else:
        rung, plan = REWIND_IN_PLACE, sentences.turn(told.to, Remedy(told.remedy), told.window, rewound="rewind")
    return Incident(
        id=ident,
        generation=told.generation,
        cause=told.cause,
        rung=OBSERVE,
        would=rung if observe else None,
        summary=sentences.finding(found),
        evidence=(sentences.evidence(found),),
        plan=sentences.would(plan) if observe else plan,
        at_s=told.at_s,
        step_at_fault=told.seen,
        started=True,
        signature=signature,
        onset=told.onset,
    )
