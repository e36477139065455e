"""(World, now, policy) → what to write: the next generation record and the incidents that changed, with the reason.

Pure and level-triggered: the same World gives the same decision, and a decision that was written makes the next one empty.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from . import observing
from .chronicle import (
    complaints_told,
    convictions_told,
    frozen_told,
    open_incident,
    phases_told,
    rewinds_told,
    shortages_told,
    stragglers_told,
)
from .detectors import suspect
from .ladder import LadderPolicy
from .machine import TABLE, Event, Move, Phase
from .orders import GenerationRecord, Incident
from .recovery import Plan, RecoveryPolicy, bound, may_resume, plan, unreadable
from .signals import AckKind, Generation, NodeId, NodeStatus, Step
from .stability import ResumePoint, choose
from .verdict import Verdict, judge
from .world import World


@dataclass(frozen=True, kw_only=True)
class Decision:
    record: GenerationRecord | None = None
    """To be written over the World's record by compare-and-swap; None leaves it."""
    incidents: tuple[Incident, ...] = ()
    """New or changed."""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What the controller decides by."""

    recovery: RecoveryPolicy = RecoveryPolicy()
    ladder: LadderPolicy = LadderPolicy()
    """The ranks', whose rewinds it tells of."""
    observe: bool = False
    """Tell what would be done, and do nothing."""


def decide(world: World, now: float, policy: Policy) -> Decision:
    """`now`: wall-clock seconds."""
    if world.record is None:
        return _open_first(world, now)
    rewinds = rewinds_told(world, policy.ladder)
    known = {incident.id for incident in world.incidents}
    numbered = sum(incident.id not in known for incident in rewinds)
    frozen = frozen_told(world, numbered)
    numbered += len(frozen)
    slow = stragglers_told(world, numbered)
    numbered += len(slow)
    short = shortages_told(world, numbered, policy.observe)
    numbered += len(short)
    sick = complaints_told(world, numbered)
    numbered += len(sick)
    told = (*rewinds, *frozen, *slow, *short, *sick, *convictions_told(phases_told(world), world))
    event, verdict, answer = _event(world, policy)
    if policy.observe:
        seen = observing.sightings_told(world, policy.ladder, numbered)
        numbered += len(seen)  # those that are not new leave a gap
        told = (*told, *seen, *observing.hangs_over(world))
        if verdict and answer and observing.only_told(verdict):
            told = (*told, *observing.verdict_told(world, verdict, answer, step_reached(world), numbered))
            event, verdict, answer = _calm(world, observe=True)
    if event is None:
        return Decision(incidents=told)
    move, phase = TABLE[world.record.phase, event]
    if move is Move.IGNORE:
        return Decision(incidents=told)
    if verdict and answer:
        incident = open_incident(world, verdict, answer, step_reached(world), numbered)
        if move is Move.REOPEN:
            decision = _reopen(world, now, incident)
        else:
            record = replace(
                world.record, phase=phase, exit_code=answer.exit_code, reason=f"{incident.summary}; {answer.reason}"
            )
            decision = Decision(record=record, incidents=(incident,), reason=answer.reason)
        told = (*told, *decision.incidents)
    elif answer:
        record = replace(world.record, phase=phase, exit_code=answer.exit_code, reason=answer.reason)
        decision = Decision(record=record, reason=answer.reason)
    else:
        decision = _advance(world, now, event, phase, policy.observe)
    ending = decision.record is not None and decision.record.phase is Phase.ENDING
    return replace(decision, incidents=_closed(world, told) if ending else told)


def _closed(world: World, told: tuple[Incident, ...]) -> tuple[Incident, ...]:
    """`told`, and every incident that is still open, closed: no recovery goes on while the job ends."""
    newest = {incident.id: incident for incident in (*world.incidents, *told)}
    known = {incident.id: incident for incident in world.incidents}
    return tuple(replace(i, open=False) for i in newest.values() if i.open or known.get(i.id) != i)


def _open_first(world: World, now: float) -> Decision:
    if world.spec is None or len(world.nodes) < world.spec.nodes:
        return Decision()
    members = {node: world.nodes[node].instance for node in sorted(world.nodes)[: world.spec.nodes]}
    first = GenerationRecord(
        number=world.spec.first_generation, phase=Phase.GATHER, members=members, reason="first start", opened_s=now
    )
    return Decision(record=first, reason="first start")


def _event(world: World, policy: Policy) -> tuple[Event | None, Verdict | None, Plan | None]:
    """What the World amounts to. A request to stop goes before a verdict: nothing is restarted for somebody who is leaving."""
    if world.requests and world.record and world.record.phase not in (Phase.ENDING, Phase.ENDED):
        return Event.STOP, None, None
    verdict = judge(suspect(world))
    if verdict:
        answer = plan(verdict, step_reached(world), _kept(world), world.incidents, policy.recovery)
        return answer.event, verdict, answer
    return _calm(world, policy.observe)


def _calm(world: World, observe: bool) -> tuple[Event | None, Verdict | None, Plan | None]:
    """And where no verdict is to be answered."""
    if observe and (end := observing.ended(world)):
        return end.event, None, end
    statuses = world.statuses()
    if world.record and all(_gone(world, node, instance) for node, instance in world.record.members.items()):
        return Event.GONE, None, None
    if len(statuses) == len(world.members) and all(s.finished or s.stopped for s in statuses):
        return Event.FINISHED, None, None
    if world.all_acked(AckKind.RUNNING):
        return Event.RUNNING, None, None
    if world.all_acked(AckKind.READY) and observe:
        return Event.READY, None, None
    if world.all_acked(AckKind.READY):
        stop = may_resume(_point(world), _said(world), bool(unreadable(world.incidents)))
        return (stop.event if stop else Event.READY), None, stop
    return None, None, None


def _gone(world: World, node: NodeId, instance: str) -> bool:
    """Whether nothing of this generation is left on `node`: it says so, or its agent, whose ranks die with it, is no more."""
    present = world.nodes.get(node)
    if present is None or present.instance != instance:
        return True
    return node in world.acks and world.acks[node].kind is AckKind.ENDED


def step_reached(world: World) -> Step:
    """Newest step that any rank finished in this generation, or, where it finished none, the one that it had started from."""
    newest = max((s.max_step for s in world.statuses()), default=-1)
    return Step(max(newest, world.record.resume_step if world.record else -1))


def _said(world: World) -> list[NodeStatus]:
    return [world.status[n] for n in world.members if n in world.status]


def _point(world: World) -> ResumePoint:
    return choose(_said(world), unreadable(world.incidents), bound(world.incidents))


def _kept(world: World) -> Step:
    """Newest step that the ranks could go back to now; what lay in the memory of an agent that is gone is gone with it."""
    members = world.record.members if world.record else {}
    alive = {n for n, instance in members.items() if n in world.nodes and world.nodes[n].instance == instance}
    return choose(
        [s if n in alive else replace(s, memory_steps=()) for n, s in world.status.items() if n in members]
    ).step


def _advance(world: World, now: float, event: Event, phase: Phase, observe: bool) -> Decision:
    assert world.record
    record = replace(world.record, phase=phase)
    if event is Event.READY:
        point = observing.beginning() if observe else _point(world)
        port = world.acks[world.members[0]].port
        turns = tuple(turn for incident in world.incidents if (turn := incident.turn))
        record = replace(record, resume_step=point.step, master_port=port, launched_s=now, turns=turns)
        return Decision(record=record, reason=point.reason)
    if event is Event.STOP:
        asked = world.requests[0]
        record = replace(record, exit_code=asked.exit_code, last_snapshot=asked.snapshot, reason=f"asked by {asked.by}")
    if event is Event.FINISHED:
        complete = all(s.finished for s in world.statuses())
        reason = "the training is over" if complete else "the script has left in order, before the end of the training"
        record = replace(record, reason=reason, complete=complete)
    return Decision(record=record, reason=record.reason)


def _reopen(world: World, now: float, incident: Incident) -> Decision:
    """The next generation, of the agents that are there now."""
    assert world.record
    members = {n: world.nodes[n].instance if n in world.nodes else was for n, was in world.record.members.items()}
    record = GenerationRecord(
        number=Generation(world.record.number + 1),
        phase=Phase.GATHER,
        members=members,
        master_addr=world.record.master_addr,
        replay_until=Step(max(world.record.replay_until, incident.step_at_fault)),
        reason=incident.summary,
        opened_s=now,
    )
    return Decision(
        record=record, incidents=(incident.with_phase("detect", now - incident.at_s),), reason=incident.plan
    )
