"""(World, now, policy) → what to write: the next generation record and the incidents that changed, with the reason.

Pure and level-triggered: the same World gives the same decision, and a decision that was written makes the next one empty.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from . import assignment, copies, describe, moving, observing, quarantine, reach
from .assignment import NodesPolicy, Seats
from .chronicle import (
    complaints_told,
    convictions_told,
    frozen_told,
    in_vain,
    open_incident,
    phases_told,
    rewinds_told,
    shortages_told,
    stragglers_told,
)
from .detectors import suspect
from .ladder import LadderPolicy
from .machine import TABLE, Event, Move, Phase
from .orders import GenerationRecord, Incident, Quarantine
from .quarantine import QuarantinePolicy
from .recovery import REWIND_IN_PLACE, Plan, RecoveryPolicy, bound, may_resume, plan, seated, unreadable
from .reports import AckKind, NodeStatus
from .requests import Ruling, carried, leaving, lost, pending, rule, turn_back, unheeded
from .stability import ResumePoint, choose, exactly
from .terms import Generation, NodeId, Step
from .turnover import bereft, cut_off_told, missed_told, moved
from .verdict import Verdict, judge, settled
from .wishes import Answer, Wish
from .world import World, once


@dataclass(frozen=True, kw_only=True)
class Decision:
    record: GenerationRecord | None = None
    """To be written over the World's record by compare-and-swap; None leaves it."""
    incidents: tuple[Incident, ...] = ()
    """New or changed."""
    answers: dict[str, Answer] = field(default_factory=dict)
    """To requests."""
    reason: str = ""
    said: str = ""
    """What of a request has been passed on to the ranks."""
    quarantine: dict[NodeId, Quarantine] = field(default_factory=dict)
    """Nodes that are shut out from now on."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What the controller decides by."""

    recovery: RecoveryPolicy = RecoveryPolicy()
    ladder: LadderPolicy = LadderPolicy()
    """The ranks', whose rewinds it tells of."""
    nodes: NodesPolicy = NodesPolicy()
    quarantine: QuarantinePolicy = QuarantinePolicy()
    lease_s: float = 0.0
    """How long the agents' leases live; 0: not known."""
    observe: bool = False
    """Tell what would be done, and do nothing."""


def decide(world: World, now: float, policy: Policy) -> Decision:
    """`now`: wall-clock seconds."""
    if world.record is None or _starts_again(world, world.record):
        return _open_first(world, now, policy.nodes)
    # Of a life that is over, only the end is left to be written; its story has been deleted.
    if world.spec and world.spec.first_generation > world.record.number:
        world = replace(world, status={})
    shut_out = {} if policy.observe else quarantine.due(world, now, policy.quarantine)
    if shut_out:
        return Decision(quarantine=shut_out)
    before = {incident.id: incident for incident in world.incidents}
    if world.record and len(world.record.members) > 1:
        away = reach.cut_off(world, now, policy.lease_s)
        world = replace(world, nodes=reach.standing_in(world, away)) if away else world
        world = world.with_incidents(cut_off_told(world, away))
    world = world.with_incidents(rewinds_told(world, policy.ladder))
    world = world.with_incidents(frozen_told(world))
    world = world.with_incidents(stragglers_told(world))
    world = world.with_incidents(shortages_told(world, policy.observe))
    world = world.with_incidents(complaints_told(world))
    world = world.with_incidents(missed_told(world, _missed(world, now)))
    world = world.with_incidents(convictions_told(phases_told(world), world))
    if policy.observe:
        world = world.with_incidents(observing.sightings_told(world, policy.ladder))
        world = world.with_incidents(observing.hangs_over(world))
    event, verdict, answer = _event(world, now, policy)
    if policy.observe and verdict and answer and observing.only_told(verdict):
        world = world.with_incidents(observing.verdict_told(world, verdict, answer, step_reached(world)))
        event, verdict, answer = _calm(world, now, policy)
    told = tuple(i for i in world.incidents if (known := before.get(i.id)) is not i and known != i)
    present = world.record
    assert present
    late = None if leaving(world) else unheeded(world, now, policy.recovery.in_place_s)
    if late and present.phase in (Phase.LAUNCH, Phase.RUN):
        decision = _reopen(world.with_incidents((late,)), now, late, assignment.again(world, now))
        return replace(decision, incidents=_merged(told, decision.incidents))
    move, phase = TABLE[present.phase, event] if event else (Move.IGNORE, present.phase)
    if event is None or move is Move.IGNORE:
        ruling = rule(world, now, step_reached(world))
        if ruling == Ruling():
            ruling = _moving(world, now, policy)
        return Decision(
            record=ruling.record,
            incidents=_merged(told, ruling.incidents),
            answers=ruling.answers,
            reason=ruling.reason,
            said="" if ruling.incidents else ruling.reason,
        )
    if verdict and answer:
        seats = assignment.again(world, now)
        answer = seated(answer, seats)
        incident = open_incident(world, verdict, answer, step_reached(world))
        if move is Move.REOPEN and answer.rung == REWIND_IN_PLACE:
            seen_s = max(s.at_s for s in verdict.blamed)
            ruling = turn_back(world, replace(incident, at_s=seen_s), _sound(world, verdict))
            decision = Decision(record=ruling.record, incidents=ruling.incidents, reason=ruling.reason)
        elif move is Move.REOPEN:
            decision = _reopen(world, now, incident, seats)
        else:
            record = replace(
                present, phase=phase, exit_code=answer.exit_code, reason=f"{incident.summary}; {answer.reason}"
            )
            tried = in_vain(world, verdict, policy.ladder)
            decision = Decision(record=record, incidents=(*tried, incident), reason=answer.reason)
    elif answer:
        record = replace(present, phase=phase, exit_code=answer.exit_code, reason=answer.reason)
        decision = Decision(record=record, reason=answer.reason)
    elif event is Event.MEMBERS:
        decision = _reseat(world, now, policy.nodes)
    else:
        decision = _advance(world, now, event, phase, policy.observe)
    told = _merged(told, decision.incidents)
    ending = decision.record is not None and decision.record.phase is Phase.ENDING
    return replace(decision, incidents=_closed(world, told) if ending else told)


def _merged(told: tuple[Incident, ...], further: tuple[Incident, ...]) -> tuple[Incident, ...]:
    """Each incident once, as it was changed last."""
    return tuple({incident.id: incident for incident in (*told, *further)}.values())


def _closed(world: World, told: tuple[Incident, ...]) -> tuple[Incident, ...]:
    """`told`, and every incident that is still open, closed: no recovery goes on while the job ends."""
    changed = {incident.id for incident in told}
    newest = world.with_incidents(told).incidents
    return tuple(replace(i, open=False) for i in newest if i.open or i.id in changed)


def _starts_again(world: World, last: GenerationRecord) -> bool:
    """Whether the job was over, and somebody has given the command once more."""
    return last.phase is Phase.ENDED and world.spec is not None and world.spec.first_generation > last.number


def _open_first(world: World, now: float, policy: NodesPolicy) -> Decision:
    seats = assignment.first(world, now, policy) if world.spec else None
    if seats is None or world.spec is None:
        return Decision()
    reason = "started again" if world.record else "first start"
    number = world.spec.first_generation
    record = GenerationRecord(number=number, phase=Phase.GATHER, members=seats.members, reason=reason, opened_s=now)
    return Decision(record=record, reason=reason)


def _event(world: World, now: float, policy: Policy) -> tuple[Event | None, Verdict | None, Plan | None]:
    """What the World amounts to. A request to stop goes before a verdict: nothing is restarted for somebody who is leaving."""
    ending = world.record is not None and world.record.phase in (Phase.ENDING, Phase.ENDED)
    if leaving(world):
        return _calm(world, now, policy) if ending else (Event.STOP, None, None)
    verdict = judge(suspect(world))
    if verdict and not settled(verdict, _unheard(world), now):
        return None, None, None
    if verdict:
        in_place = _all_at_work(world) and not verdict.consequences and _sound(world, verdict) >= 0
        known = world.incidents
        answer = plan(verdict, step_reached(world), _kept(world), known, policy.recovery, in_place=in_place)
        if answer.event is Event.FAULT or not ending:  # which it does already
            return answer.event, verdict, answer
    return _calm(world, now, policy)


def _unheard(world: World) -> bool:
    """Whether one of several members has said nothing of an end of its ranks."""
    told = sum(bool(status.exits) for status in world.statuses())
    return told < len(world.members) > 1


def _calm(world: World, now: float, policy: Policy) -> tuple[Event | None, Verdict | None, Plan | None]:
    """And where no verdict is to be answered."""
    if policy.observe and (end := observing.ended(world)):
        return end.event, None, end
    statuses = world.statuses()
    ending = world.record is not None and world.record.phase is Phase.ENDING
    if ending and world.record and all(_gone(world, node, instance) for node, instance in world.record.members.items()):
        return Event.GONE, None, None
    on_the_move = world.record is not None and world.record.moving
    if _others_wanted(world, now) or (on_the_move and _move(world, now, policy)[0] is moving.Move.GO):
        return Event.MEMBERS, None, None
    if len(statuses) == len(world.members) and all(s.finished or s.stopped for s in statuses):
        return Event.FINISHED, None, None
    if world.all_acked(AckKind.RUNNING):
        return Event.RUNNING, None, None
    # Each has said before what is there; where an older word of it has come to pass late, it says so again.
    ready = world.all_acked(AckKind.READY) and len(statuses) == len(world.members)
    ready = ready and all(node in world.nodes for node in world.members)
    if ready and policy.observe:
        return Event.READY, None, None
    if ready:
        stop = may_resume(_point(world), _said(world), bool(unreadable(world.incidents)))
        return (stop.event if stop else Event.READY), None, stop
    return None, None, None


def _others_wanted(world: World, now: float) -> bool:
    """Whether the place of one who is gone, or shut out, can be taken now: by another node, or by a new agent of its own."""
    record = world.record
    if record is None or record.phase is not Phase.GATHER:
        return False
    here = assignment.usable(world, now)
    if all(node in here and here[node].instance == instance for node, instance in record.members.items()):
        return False
    return [*assignment.again(world, now).members.items()] != [*record.members.items()]


def _missed(world: World, now: float) -> tuple[NodeId, ...]:
    """Members that are gone, and whose place nobody can take: they are waited for."""
    record = world.record
    if record is None or record.phase is not Phase.GATHER or record.members.keys() <= world.nodes.keys():
        return ()
    return tuple(node for node in assignment.again(world, now).missed if node not in world.nodes)


def _all_at_work(world: World) -> bool:
    """Whether all ranks are in their loop, and nothing else is asked of them."""
    told, record = world.statuses(), world.record
    busy = record is None or record.phase is not Phase.RUN or pending(world) is not None
    return not busy and len(told) == len(world.members) and all(s.stepped_s and not s.exits for s in told)


def _sound(world: World, verdict: Verdict) -> Step:
    """The newest state from before the verdict's onset at which the replicas agreed; -1: none."""
    return choose(_said(world), unreadable(world.incidents), verdict.onset).step


def _gone(world: World, node: NodeId, instance: str) -> bool:
    """Whether nothing of this generation is left on `node`: it says so, or its agent, whose ranks die with it, is no more."""
    present = world.nodes.get(node)
    if present is None or present.instance != instance:
        return True
    return node in world.acks and world.acks[node].kind is AckKind.ENDED


def step_reached(world: World) -> Step:
    """Newest step that any rank finished in this generation, or, where it finished none, the one that it had started from."""
    newest, record = max((s.max_step for s in world.statuses()), default=-1), world.record
    over = record.replay_until if record and record.phase is Phase.ENDING and record.complete else -1
    return Step(max(newest, record.resume_step if record else -1, over))


@once
def _said(world: World) -> list[NodeStatus]:
    """Of the members, with what they can have from other nodes' memory, and without what their own holds of other ranks."""
    own, lent = copies.own(world), copies.fetchable(world)
    told = ((world.status[n], own.get(n, ()), lent.get(n, ())) for n in world.members if n in world.status)
    return [
        s if s.memory_steps == kept and not had else replace(s, memory_steps=(*kept, *had)) for s, kept, had in told
    ]


@once
def _point(world: World) -> ResumePoint:
    return choose(_said(world), unreadable(world.incidents), bound(world.incidents))


def _kept(world: World) -> Step:
    """Newest step that the ranks could go back to now; what lay in the memory of an agent that is gone is gone with it, but for copies."""
    return choose(_said(world)).step


def _advance(world: World, now: float, event: Event, phase: Phase, observe: bool) -> Decision:
    assert world.record
    record = replace(world.record, phase=phase)
    if event is Event.READY:
        order = pending(world)
        there = exactly(_said(world), order.to, unreadable(world.incidents)) if order else None
        point = there or (observing.beginning() if observe else _point(world))
        chief = world.members[0]
        turns = tuple(turn for incident in world.incidents if (turn := incident.turn))
        where = {"master_addr": world.nodes[chief].address, "master_port": world.acks[chief].port}
        sources = {n: found[point.step] for n, found in copies.fetchable(world).items() if point.step in found}
        record = replace(record, resume_step=point.step, launched_s=now, turns=turns, **where)  # type: ignore[arg-type]
        record = replace(record, sources=sources, holders=copies.apart(world), onset=bound(world.incidents))
        record = replace(record, rewind=None, begins=order if there else None)
        given_up = (lost(world, order),) if order and there is None else ()
        return Decision(record=record, incidents=given_up, reason=point.reason + copies.words(sources))
    if event is Event.STOP:
        asked = leaving(world)
        assert asked
        what = f"node {asked.node} is drained" if asked.kind == Wish.DRAIN else "asked"
        record = replace(
            record,
            exit_code=asked.exit_code,
            last_snapshot=asked.snapshot or asked.kind == Wish.DRAIN,
            leave_by_s=asked.at_s + asked.budget_s if asked.budget_s else 0.0,
            reason=f"{what} by {asked.by}",
        )
    if event is Event.FINISHED:
        complete = all(s.finished for s in world.statuses())
        reason = "the training is over" if complete else "the script has left in order, before the end of the training"
        # Their ranks gone, nodes do not tell any more how far these had come.
        reached = Step(max(record.replay_until, step_reached(world)))
        record = replace(record, reason=reason, complete=complete, replay_until=reached)
    return Decision(record=record, reason=record.reason)


def _reopen(world: World, now: float, incident: Incident, seats: Seats) -> Decision:
    """The next generation, for a fault."""
    record, story = _next(world, now, seats, incident.summary, incident.step_at_fault)
    detected = incident.with_phase("detect", now - incident.at_s)
    return Decision(record=record, incidents=(*story, detected), reason=incident.plan)


def _move(world: World, now: float, policy: Policy) -> tuple[moving.Move, str]:
    return moving.move(world, now, policy.nodes, policy.recovery.in_place_s)


def _moving(world: World, now: float, policy: Policy) -> Ruling:
    """On the way to another set of nodes, as long as ranks train on these."""
    step, why = _move(world, now, policy)
    if step is moving.Move.BEGIN and world.record:
        return Ruling(record=replace(world.record, moving=why, moving_s=now), reason=f"all ranks wait: {why}")
    if step is moving.Move.DROP and world.record:
        return Ruling(record=replace(world.record, moving=""), reason="the ranks go on where they are")
    return Ruling()


def _reseat(world: World, now: float, policy: NodesPolicy) -> Decision:
    """The next generation, of other nodes. While it gathers, the incident that has ended the one before is still open: it was the first
    sign of what has become of a node."""
    assert world.record
    settled_s = policy.grow_after_s if world.record.phase is Phase.RUN else None
    seats = assignment.again(world, now, settled_s)
    back = [node for node, i in seats.members.items() if world.record.members.get(node, i) != i]
    reason = "; ".join(filter(None, (describe.seats(seats), describe.back(back))))
    record, story = _next(world, now, seats, reason, step_reached(world))
    if world.record.phase is Phase.RUN:
        story = (*story, moved(world, seats, reason, now, step_reached(world)))
    else:
        story = (*story, *bereft(world, seats, reason))
    return Decision(record=record, incidents=story, reason=reason)


def _next(
    world: World, now: float, seats: Seats, reason: str, reached: Step
) -> tuple[GenerationRecord, tuple[Incident, ...]]:
    """And the incidents that change with it."""
    assert world.record
    order, story = carried(world)
    number, before = Generation(world.record.number + 1), world.record
    record = GenerationRecord(
        number=number,
        phase=Phase.GATHER,
        members=seats.members,
        joined={
            n: before.joined.get(n, number)
            for n in seats.members
            if n not in before.members or n in before.joined  # of the others, all that memory holds is of this course
        },
        master_addr=world.record.master_addr,
        replay_until=Step(max(world.record.replay_until, reached)),
        reason=reason,
        opened_s=now,
        paused=world.record.paused,
        rewind=order,
        snapshot="" if world.record.snapshot in world.answers else world.record.snapshot,
        dismissed=tuple(i for i in world.record.dismissed if any(node.instance == i for node in world.nodes.values())),
    )
    return record, story
