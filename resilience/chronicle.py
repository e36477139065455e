"""The story of each incident, derived from the World: what was concluded, and how long every phase of the recovery took.

World → new or changed `Incident`s. Nothing is decided here; `decision` writes what this module tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from . import describe, weighing
from .detectors import Cause
from .findings import InPlaceRewind
from .incident import PHASES, Incident
from .ladder import AGAIN, LadderPolicy, Remedy, near, origin
from .machine import Phase
from .recovery import OBSERVE, RESTARTS, REWIND_IN_PLACE, Plan
from .reports import NodeStatus
from .spikes import Finding, Kind
from .terms import Step
from .verdict import Verdict
from .world import World


def next_id(world: World, further: int = 0) -> str:
    """For an incident that is told together with `further` other new ones, which `world` does not know yet."""
    return f"{max((int(i.id) for i in world.incidents), default=0) + further + 1:04d}"


def open_incident(world: World, verdict: Verdict, answer: Plan, reached: Step) -> Incident:
    assert world.record
    evidence = describe.few([*dict.fromkeys(s.evidence for s in verdict.blamed)])
    consequences = describe.few([*dict.fromkeys(s.evidence for s in verdict.consequences)])
    seen = tuple(f"also seen, as a consequence: {said}" for said in consequences)
    details = tuple(line for told in dict.fromkeys(s.details for s in verdict.blamed) for line in told)
    sick = describe.few(
        [
            f"on the same node: {describe.complaint(complaint, node)}"
            for node in dict.fromkeys(s.node for s in verdict.blamed)
            for complaint in (world.status[node].complaints if node in world.status else ())
        ]
    )
    traces = tuple(e.traceback for s in world.statuses() for e in s.exits if e.traceback and e.kind not in tuple(Kind))[
        :1
    ]
    return Incident(
        id=next_id(world),
        generation=world.record.number,
        cause=verdict.cause,
        rung=answer.rung,
        summary=verdict.describe(),
        evidence=tuple(dict.fromkeys((*evidence, *details, *sick, *seen, *traces))),
        weighed=weighing.against(verdict, world),
        plan=answer.reason,
        at_s=verdict.at_s,
        step_at_fault=reached,
        started=verdict.started,
        nodes=tuple(dict.fromkeys(s.node for s in verdict.blamed)),
        onset=verdict.onset,
        signature=verdict.signature,
    )


def in_vain(world: World, verdict: Verdict, policy: LadderPolicy) -> tuple[Incident, ...]:
    """The rewinds that a fault has come back after, now that the ranks give it up."""
    steps = [s.step for s in verdict.blamed if s.cause in tuple(Kind)]
    still = (i for i in world.incidents if i.open and i.rung == REWIND_IN_PLACE and i.cause in tuple(Kind))
    return tuple(replace(i, open=False, origin=AGAIN) for i in still if any(near(i.onset, at, policy) for at in steps))


def rewinds_told(world: World, policy: LadderPolicy) -> tuple[Incident, ...]:
    """Rewinds in place that ranks report, as incidents: new ones, and those that are over."""
    known = {incident.signature: incident for incident in world.incidents if incident.rung == REWIND_IN_PLACE}
    fresh: list[Incident] = []
    obeyed: dict[str, Incident] = {}
    for status in world.statuses():
        for told in status.rewinds:
            if told.order:
                obeyed |= {i.id: _obeyed(i, told) for i in world.incidents if int(i.id) == told.order and not i.remedy}
                continue
            signature = f"rewind:{told.generation}:{told.ordinal}"
            if signature not in known:
                incident = _of_rewind(told, signature, next_id(world, len(fresh)), world)
                known[signature] = replace(incident, weighed=tuple(weighing.agreement(world.statuses())))
                fresh.append(known[signature])
    ordered = [*(i for i in world.incidents if i.rung == REWIND_IN_PLACE and i.cause in tuple(Kind)), *fresh]
    over = [_cured(incident, ordered[at + 1 :], world, policy) for at, incident in enumerate(ordered)]
    changed = (after for before, after in zip(ordered, over, strict=True) if after != before or before in fresh)
    return (*changed, *obeyed.values())


def _obeyed(incident: Incident, told: InPlaceRewind) -> Incident:
    """An order that the ranks have carried out, by going back or by beginning there."""
    live = incident.rung == REWIND_IN_PLACE
    return replace(
        incident,
        plan=describe.turn(told.to, Remedy(told.remedy), told.window, live),
        step_at_fault=told.reached if live else told.to,
        resume_step=told.to,
        remedy=told.remedy,
        window=told.window,
        open=False,
        phases_s={"restore": round(told.restore_s, 4)},
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
        summary=describe.finding(finding),
        evidence=(describe.evidence(finding), *([describe.out_of_line(told.ranks)] if told.ranks else [])),
        plan=describe.turn(told.to, Remedy(told.remedy), told.window),
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
    """A rewind is over when the ranks are past the onset for good, or have gone back for the same fault again. later: rewinds after it."""
    if not incident.open:
        return incident
    if any(near(other.onset, incident.onset, policy) for other in later):
        return replace(incident, open=False, origin=AGAIN)
    statuses = world.statuses()
    past = [s.finished or s.min_step >= incident.step_at_fault + policy.settled_steps for s in statuses]
    if len(statuses) < len(world.members) or not all(past):
        return incident
    return replace(incident, open=False, origin=origin(Remedy(incident.remedy)))


def frozen_told(world: World) -> tuple[Incident, ...]:
    """Weights that stand still are told, once, and not acted upon: a script may mean it."""
    assert world.record
    known = {incident.signature for incident in world.incidents}
    fresh: list[Incident] = []
    for status in world.statuses():
        signature = f"frozen:{status.frozen}"
        if status.frozen < 0 or signature in known:
            continue
        fresh.append(
            Incident(
                id=next_id(world, len(fresh)),
                generation=status.generation,
                cause=Cause.FROZEN,
                rung=OBSERVE,
                summary=f"no parameter has changed since step {status.frozen}",
                evidence=("the learning rate is not 0, and all fingerprints of the parameters are the same",),
                plan="nothing is done: look at the optimizer, the gradients and the learning rate",
                at_s=status.at_s,
                step_at_fault=status.max_step,
                started=True,
                signature=signature,
                open=False,
            )
        )
        known.add(signature)
    return tuple(fresh)


def stragglers_told(world: World) -> tuple[Incident, ...]:
    """A rank that has become slow is told; the incident is over when it is slow no more, or gone."""
    assert world.record
    slow = {
        f"{Cause.STRAGGLER}:{status.generation}:{found.rank}:{found.step}": (node, found)
        for node, status in world.status.items()
        if status.generation == world.record.number
        for found in status.stragglers
    }
    known = {incident.signature: incident for incident in world.incidents if incident.cause == Cause.STRAGGLER}
    changed = [replace(i, open=False) for i in known.values() if i.open and i.signature not in slow]
    fresh = [(signature, *found) for signature, found in slow.items() if signature not in known]
    for further, (signature, node, found) in enumerate(fresh):
        incident = Incident(
            id=next_id(world, further),
            generation=world.record.number,
            cause=Cause.STRAGGLER,
            rung=OBSERVE,
            summary=describe.straggler(found, node),
            evidence=describe.straggling(found),
            plan="nothing is done: there is no other machine to take its place; the others wait for it at each step",
            at_s=found.at_s,
            step_at_fault=found.step,
            started=True,
            signature=signature,
        )
        changed.append(incident)
    return tuple(changed)


def shortages_told(world: World, observe: bool) -> tuple[Incident, ...]:
    """Memory that runs out is told, and over when it does no more."""
    short = {
        f"{Cause.MEMORY_SHORT}:{node}:{status.shortage.at_s}": (node, status, status.shortage)
        for node, status in world.status.items()
        if status.shortage
    }
    known = {incident.signature: incident for incident in world.incidents if incident.cause == Cause.MEMORY_SHORT}
    changed = [replace(i, open=False) for i in known.values() if i.open and i.signature not in short]
    fresh = [(signature, *found) for signature, found in short.items() if signature not in known]
    asked = "a snapshot on disk is asked for, and again while it lasts: so little is lost if the kernel kills a rank"
    for further, (signature, node, status, found) in enumerate(fresh):
        incident = Incident(
            id=next_id(world, further),
            generation=status.generation,
            cause=Cause.MEMORY_SHORT,
            rung=OBSERVE,
            would=OBSERVE if observe else None,
            summary=describe.shortage(found, node),
            evidence=describe.growth(found),
            plan=describe.would(asked) if observe else asked,
            at_s=found.at_s,
            step_at_fault=status.max_step,
            started=status.max_step >= 0,
            signature=signature,
        )
        changed.append(incident)
    return tuple(changed)


def complaints_told(world: World) -> tuple[Incident, ...]:
    """What devices say of themselves is told, once."""
    known = {incident.signature for incident in world.incidents}
    fresh: list[Incident] = []
    for node, status in world.status.items():
        for complaint in status.complaints:
            signature = f"{Cause.DEVICE_SICK}:{node}:{complaint.at_s}:{complaint.device}:{complaint.words}"
            if signature in known:
                continue
            incident = Incident(
                id=next_id(world, len(fresh)),
                generation=status.generation,
                cause=Cause.DEVICE_SICK,
                rung=OBSERVE,
                summary=describe.complaint(complaint, node),
                evidence=(),
                plan="nothing is done as long as the training goes on; look after the device when it may be spared",
                at_s=complaint.at_s,
                step_at_fault=Step(complaint.step),
                started=complaint.step >= 0,
                signature=signature,
                open=False,
            )
            fresh.append(incident)
    return tuple(fresh)


def convictions_told(changed: tuple[Incident, ...], world: World) -> tuple[Incident, ...]:
    """`changed`, and the incidents that have changed further because computing a step again has shown who was wrong."""
    newest = {incident.id: incident for incident in (*world.incidents, *changed)}
    further = {incident.id: incident for incident in changed}
    for found in (m for status in world.status.values() for m in status.mismatches if m.replayed and m.wrong):
        sentence = describe.convicted(found)
        for incident in newest.values():
            same = (incident.generation, incident.signature) == (found.generation, describe.mismatch_signature(found))
            if same and sentence not in incident.evidence:
                further[incident.id] = replace(incident, evidence=(*incident.evidence, sentence))
    return tuple(further.values())


def phases_told(world: World) -> tuple[Incident, ...]:
    """Phase times of restarts that are not over, as far as the statuses of the present generation tell them. A recovery that another
    fault interrupts is over when the one that follows it is."""
    assert world.record
    record, changed = world.record, []
    for incident in world.incidents:
        if not incident.open or incident.rung not in RESTARTS or incident.generation >= record.number:
            continue
        if incident.cause == Cause.ORDERED:  # its phases are those of the fault that has ended the gang
            continue
        after = _with_phases(incident, world)
        if after != incident:
            changed.append(after)
    return tuple(changed)


def _with_phases(incident: Incident, world: World) -> Incident:
    assert world.record
    statuses = world.statuses()
    if world.record.phase is Phase.GATHER or len(statuses) < len(world.members):
        return incident
    launched, opened_s = world.record.launched_s, world.record.opened_s
    if incident.cause == Cause.AGENT_LOST:  # the node may have been waited for, and several generations opened for it
        opened_s = incident.at_s + incident.phases_s.get("detect", 0.0)
    marks = [opened_s, launched]
    marks += [max(times) if all(times) else 0.0 for times in zip(*(_marks(s) for s in statuses), strict=True)]
    if incident.resume_step is None:
        incident = replace(incident, resume_step=world.record.resume_step)
    if "start" not in incident.phases_s:  # ranks that start later do so for reasons of their own
        incident = replace(incident, launch=incident.launch or statuses[0].launch)
    if world.record.replay_until <= world.record.resume_step:
        marks[-1] = marks[-2]  # nothing is computed again
    for name, (start, end) in zip(PHASES[1:], pairwise(marks), strict=True):
        if not end:
            return incident
        incident = incident.with_phase(name, end - start)
    return replace(incident, open=False)


def _marks(status: NodeStatus) -> tuple[float, ...]:
    return (status.attached_s, status.built_s, status.restored_s, status.stepped_s, status.replayed_s)
