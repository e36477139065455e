"""Incidents of rewinds in place, as the ranks report them: opens new incidents, and closes those that are over. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..diagnose import alternatives
from ..diagnose.root_cause import Verdict
from ..inprocess.loss_spike import Finding
from ..inprocess.rewind_ladder import LadderPolicy, origin, same
from ..model.cause import Kind
from ..model.cluster_state import World
from ..model.incident import Incident
from ..model.rewind import AGAIN, Remedy
from ..model.signals import InPlaceRewind
from ..plan.escalation import REWIND_IN_PLACE
from ..text import sentences
from .lifecycle import next_id


def in_vain(world: World, verdict: Verdict, policy: LadderPolicy) -> tuple[Incident, ...]:
    """Return the incidents of the rewinds that did not cure the fault, now that the ranks give up."""
    steps = [s.step for s in verdict.blamed if s.cause in tuple(Kind)]
    still = (i for i in world.incidents if i.open and i.rung == REWIND_IN_PLACE and i.cause in tuple(Kind))
    return tuple(
        replace(i, open=False, origin=AGAIN)
        for i in still
        if any(same(i.cause, i.onset, at, policy, i.window) for at in steps)
    )


def rewinds_told(world: World, policy: LadderPolicy) -> tuple[Incident, ...]:
    """Return the incidents of rewinds in place that ranks report: new incidents, and incidents that are now closed."""
    known = {incident.signature: incident for incident in world.incidents if incident.rung == REWIND_IN_PLACE}
    fresh: list[Incident] = []
    obeyed: dict[str, Incident] = {}
    for status in world.uncalm_statuses():
        for told in status.rewinds:
            if told.order:
                orders = [i for i in world.incidents if int(i.id) == told.order] or [_forgotten(told)]
                obeyed |= {i.id: _obeyed(i, told) for i in orders if not i.remedy}
                continue
            signature = f"rewind:{told.generation}:{told.ordinal}"
            if signature not in known:
                incident = _of_rewind(told, signature, next_id(world, len(fresh)), world)
                known[signature] = replace(incident, weighed=tuple(alternatives.agreement(world.statuses())))
                fresh.append(known[signature])
    ordered = [*(i for i in world.incidents if i.rung == REWIND_IN_PLACE and i.cause in tuple(Kind)), *fresh]
    over = [_cured(incident, ordered[at + 1 :], world, policy) for at, incident in enumerate(ordered)]
    changed = (after for before, after in zip(ordered, over, strict=True) if after != before or before in fresh)
    return (*changed, *obeyed.values())


def _obeyed(incident: Incident, told: InPlaceRewind) -> Incident:
    """Return the incident of an order that the ranks have obeyed, by rewinding or by beginning at that step."""
    live = incident.rung == REWIND_IN_PLACE
    return replace(
        incident,
        plan=sentences.turn(told.to, Remedy(told.remedy), told.window, live),
        step_at_fault=told.reached if live else incident.step_at_fault if incident.left else told.to,
        resume_step=told.to,
        remedy=told.remedy,
        window=told.window,
        open=False,
        phases_s={"restore": round(told.restore_s, 4)},
    )


def _forgotten(told: InPlaceRewind) -> Incident:
    """Return an incident for an order that the ranks have obeyed, and that etcd has lost."""
    return Incident(
        id=f"{told.order:04d}",
        generation=told.generation,
        cause=told.cause,
        rung=REWIND_IN_PLACE,
        summary=f"a rewind to step {told.to} was ordered; etcd has lost who ordered it",
        plan="",
        at_s=told.at_s,
        step_at_fault=told.reached,
        started=True,
        signature=f"order:{told.generation}:{told.order}",
    )


def _of_rewind(told: InPlaceRewind, signature: str, ident: str, world: World) -> Incident:
    each = world.spec.ranks if world.spec else 0
    finding = Finding(
        kind=Kind(told.cause), onset=told.onset, seen=told.reached, value=told.value, expected=told.expected
    )
    return Incident(
        id=ident,
        generation=told.generation,
        cause=told.cause,
        rung=REWIND_IN_PLACE,
        summary=sentences.finding(finding),
        evidence=(sentences.evidence(finding), *([sentences.out_of_line(told.ranks)] if told.ranks else [])),
        plan=sentences.turn(told.to, Remedy(told.remedy), told.window),
        at_s=told.at_s,
        step_at_fault=told.reached,
        resume_step=told.to,
        started=True,
        signature=signature,
        onset=told.onset,
        remedy=told.remedy,
        window=told.window,
        ranks=told.ranks,
        nodes=tuple(dict.fromkeys(world.members[rank // each] for rank in told.ranks)) if each else (),
        phases_s={"restore": round(told.restore_s, 4)},
    )


def _cured(incident: Incident, later: Sequence[Incident], world: World, policy: LadderPolicy) -> Incident:
    """Return the incident, closed if it is over. An incident is over when the ranks are `settled_steps` past the step of the fault. An
    incident is also over when the ranks have found the same fault again: they have rewound because of it, or wait because of a spike in the
    replayed steps. later: incidents of later rewinds."""
    if not incident.open:
        return incident
    if any(same(incident.cause, incident.onset, other.onset, policy, incident.window) for other in later):
        return replace(incident, open=False, origin=AGAIN)
    statuses = world.statuses()
    seen = (told for status in statuses for told in status.sightings if told.generation == incident.generation)
    if any(told.at_s > incident.at_s and told.onset <= incident.step_at_fault for told in seen):
        return replace(incident, open=False, origin=AGAIN)
    past = [s.finished or s.min_step >= incident.step_at_fault + policy.settled_steps for s in statuses]
    if len(statuses) < len(world.members) or not all(past):
        return incident
    repeated = max(status.repeated for status in statuses)
    return replace(incident, open=False, origin=origin(Remedy(incident.remedy)), repeated=repeated)
