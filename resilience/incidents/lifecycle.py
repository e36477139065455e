"""Derives the incidents of answered faults from the World: what was concluded, and how long each phase of the recovery took.

This module decides nothing; the controller writes the new or changed `Incident`s that it returns.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from ..diagnose import alternatives
from ..diagnose.root_cause import Verdict
from ..model.cause import Cause, Kind
from ..model.cluster_state import World, once_said
from ..model.incident import PHASES, Incident
from ..model.state_machine import Phase
from ..model.types import Step
from ..plan.escalation import RESTARTS, Plan
from ..text import formatting, sentences

RECENT_S = 600.0
"""A complaint of a device may explain a fault that strikes its node within so many seconds."""


def next_id(world: World, further: int = 0) -> str:
    """Return the number of a new incident. further: how many other new incidents `world` does not have yet. Numbers of orders are never
    used again, even if etcd has lost its data: ranks ignore a second order with the same number."""
    return f"{max([_ordered(world), *(int(i.id) for i in world.incidents)]) + further + 1:04d}"


@once_said
def _ordered(world: World) -> int:
    """Return the greatest number of a rewind order in the record and in the nodes' statuses."""
    record, said = world.record, world.uncalm().values()
    orders = [order.number for order in (record.rewind, record.begins) if order] if record else []
    obeyed = [told.order for status in said for told in status.rewinds]
    return max([0, *orders, *obeyed, *[status.declined for status in said]])


def open_incident(world: World, verdict: Verdict, answer: Plan, reached: Step) -> Incident:
    evidence = formatting.few([*dict.fromkeys(s.evidence for s in verdict.blamed)])
    consequences = formatting.few([*dict.fromkeys(s.evidence for s in verdict.consequences)])
    seen = tuple(f"also seen, as a consequence: {said}" for said in consequences)
    details = tuple(line for told in dict.fromkeys(s.details for s in verdict.blamed) for line in told)
    complaints = [
        (complaint.at_s, sentences.complaint(complaint, node))
        for node in dict.fromkeys(s.node for s in verdict.blamed)
        for complaint in (world.status[node].complaints if node in world.status else ())
    ]
    sick = formatting.few([f"on the same node: {words}" for _, words in complaints])
    recent = [f"around that time, {words}" for at_s, words in complaints if at_s > verdict.at_s - RECENT_S][-1:]
    blamed = {s.rank for s in verdict.blamed}
    every = [end for status in world.uncalm_statuses() for end in status.exits]
    ends = sorted(every, key=lambda end: (end.rank not in blamed, end.at_s))
    traces = tuple(end.traceback for end in ends if end.traceback and end.kind not in tuple(Kind))[:1]
    if not traces:
        traces = tuple(
            f"rank {end.rank} had printed last:\n{end.last_lines}"
            for end in ends
            if end.last_lines and end.kind == "exit"
        )[:1]
    return replace(
        bare_incident(world, verdict, answer.rung, reached),
        id=next_id(world),
        summary="; ".join((verdict.describe(), *recent)),
        evidence=tuple(dict.fromkeys((*evidence, *details, *sick, *seen, *traces))),
        weighed=alternatives.against(verdict, world),
        plan=answer.reason,
        unfit=answer.unfit,
        pause_s=answer.pause_s,
    )


def bare_incident(world: World, verdict: Verdict, rung: int, reached: Step) -> Incident:
    """Return the incident with the fields that judgements use. The incident's texts for people stay empty, because making them takes long
    for thousands of ranks."""
    return Incident(
        id="",
        generation=world.present.number,
        cause=verdict.cause,
        rung=rung,
        summary="",
        at_s=verdict.at_s,
        step_at_fault=reached,
        started=verdict.started,
        loop_skipped=verdict.through and world.present.resume_step == reached,
        nodes=verdict.nodes,
        size=len(world.members),
        onset=verdict.onset,
        signature=verdict.signature,
    )


def convictions_told(changed: tuple[Incident, ...], world: World) -> tuple[Incident, ...]:
    """Return `changed`, and the incidents that have changed because a replayed step has shown which replica was wrong."""
    newest = {incident.id: incident for incident in (*world.incidents, *changed)}
    further = {incident.id: incident for incident in changed}
    for found in (m for status in world.uncalm().values() for m in status.mismatches if m.replayed and m.wrong):
        sentence = sentences.convicted(found)
        for incident in newest.values():
            same = (incident.generation, incident.signature) == (found.generation, sentences.mismatch_signature(found))
            if same and sentence not in incident.evidence:
                further[incident.id] = replace(incident, evidence=(*incident.evidence, sentence))
    return tuple(further.values())


def phases_told(world: World) -> tuple[Incident, ...]:
    """Return the incidents of restarts to which the present generation's statuses add phase times. If another fault interrupts a recovery,
    its incident is closed when the following recovery is over."""
    record, changed = world.present, []
    for incident in world.incidents:
        if not incident.open or incident.rung not in RESTARTS or incident.generation >= record.number:
            continue
        if incident.cause == Cause.ORDERED:  # the incident of the fault that ended the worker group has the phases
            continue
        after = _with_phases(incident, world)
        if after != incident:
            changed.append(after)
    return tuple(changed)


def _with_phases(incident: Incident, world: World) -> Incident:
    statuses = world.statuses()
    if world.present.phase is Phase.GATHER or len(statuses) < len(world.members):
        return incident
    launched, opened_s = world.present.launched_s, world.present.opened_s
    if incident.cause == Cause.AGENT_LOST:  # the job may have waited for the node, and opened several generations
        opened_s = incident.at_s + incident.phases_s.get("detect", 0.0)
    marks = [opened_s, launched]
    told = [(s.attached_s, s.built_s, s.restored_s, s.stepped_s, s.replayed_s) for s in statuses]
    marks += [max(times) if all(times) else 0.0 for times in zip(*told, strict=True)]
    if incident.resume_step is None:
        incident = replace(incident, resume_step=world.present.resume_step)
    if "start" not in incident.phases_s:  # a later start of the ranks has another reason
        incident = replace(incident, launch=incident.launch or statuses[0].launch)
    if world.present.replay_until <= world.present.resume_step:
        marks[-1] = marks[-2]  # no step is replayed
    for name, (start, end) in zip(PHASES[1:], pairwise(marks), strict=True):
        if not end:
            return incident
        incident = incident.with_phase(name, end - start)
    other_data = any(status.other_data for status in statuses) and world.present.resume_step >= 0
    return replace(incident, open=False, repeated=max(status.repeated for status in statuses), other_data=other_data)
