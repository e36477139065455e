"""The record to write after an event: the next phase of a generation, or the next generation. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ..errors import UsageError
from ..incidents.membership_changes import bereft, moved
from ..membership import buddy_sources, quarantine, rank_assignment
from ..membership.rank_assignment import NodesPolicy
from ..model.cluster_state import World
from ..model.generation import Decision, GenerationRecord, Seats
from ..model.incident import Incident, turns
from ..model.request import Answer, Wish
from ..model.rewind import Turn
from ..model.state_machine import Event, Phase
from ..model.types import Generation, Step
from ..plan import recoverable_state
from ..text import formatting, sentences
from . import observe_only
from .operator_requests import leaving, waiting
from .rewind_orders import carried, lost, pending


def first(world: World, now: float, policy: NodesPolicy) -> Decision:
    """Return the first generation; or the job's end, if a request stops the job before it begins."""
    if world.spec is None:
        return Decision()
    number = world.spec.first_generation
    stops = [request for request in waiting(world) if request.kind == Wish.STOP]
    if stops:
        why = f"stopped by {stops[0].by} before it began"
        over = GenerationRecord(number=number, phase=Phase.ENDED, members={}, exit_code=stops[0].exit_code, reason=why)
        return Decision(record=over, reason=why)
    drains = [request for request in waiting(world) if request.kind == Wish.DRAIN]
    if drains:
        why = "the job has not begun, so there is nothing to drain. Nothing was done; end the agent of that node with Ctrl-C or SIGTERM"
        return Decision(answers={r.id: Answer(sentence=why, exit_code=UsageError.exit_code) for r in drains})
    seats = rank_assignment.first(world, now, policy)
    if seats is None:
        return Decision()
    reason = "started again" if world.record else "first start"
    record = GenerationRecord(number=number, phase=Phase.GATHER, members=seats.members, reason=reason, opened_s=now)
    return Decision(record=record, reason=reason)


def advance(world: World, now: float, event: Event, phase: Phase, observe: bool) -> Decision:
    record = replace(world.present, phase=phase)
    if event is Event.READY:
        order = pending(world)
        there = recoverable_state.ordered(world, order) if order else None
        point = there or (observe_only.beginning() if observe else recoverable_state.point(world))
        chief = world.members[0]
        where = {"master_addr": world.nodes[chief].address, "master_port": world.acks[chief].port}
        back = order is not None and there is not None and order.left != ""
        lent = {} if back else buddy_sources.fetchable(world)
        chosen = (*point.course, point.step)
        sources = {n: found[chosen] for n, found in lent.items() if chosen in found}
        done = () if back else _turns(world)
        record = replace(record, resume_step=point.step, resume_course=point.course, turns=done, **where)  # type: ignore[arg-type]
        record = replace(
            record,
            launched_s=now,
            sources=sources,
            holders=buddy_sources.apart(world),
            onset=recoverable_state.onset(world),
        )
        record = replace(record, rewind=None, begins=order if there else None, new=(), left=())
        given_up = lost(world) if order and there is None else ()
        reason = point.reason + buddy_sources.words(sources)
        said = f"going back to {reason}" if record.number > 1 else ""
        return Decision(record=record, incidents=given_up, reason=reason, said=said)
    if event is Event.STOP:
        asked = leaving(world, now)
        assert asked
        several = world.spec is not None and world.spec.nodes > 1
        drained = f"node {asked.node}{', which the job cannot do without,' * several} is drained"
        what, hint = drained if asked.kind == Wish.DRAIN else "stopped", ""
        barred = [node for node in quarantine.in_force(world, now) if node in world.nodes]
        if barred and asked.kind == Wish.DRAIN:
            hint = f"; {formatting.listed(barred)} could train in its place, once readmitted"
        record = replace(
            record,
            exit_code=asked.exit_code,
            last_snapshot=asked.snapshot or asked.kind == Wish.DRAIN,
            leave_in_s=asked.budget_s,
            reason=f"{what} by {asked.by}{hint}",
        )
    if event is Event.FINISHED:
        complete = all(s.finished for s in world.statuses())
        reason = (
            "the training is over" if complete else "the script ended its loop normally, before the end of the training"
        )
        # Once the ranks are gone, nodes no longer report how far the ranks had come.
        reached = Step(max(record.replay_until, recoverable_state.step_reached(world)))
        record = replace(record, reason=reason, complete=complete, replay_until=reached)
    return Decision(record=record, reason=record.reason)


def reopen(world: World, now: float, incident: Incident, seats: Seats) -> Decision:
    """Return the next generation after a fault."""
    record, story = _next(world, now, seats, incident.summary, incident.step_at_fault)
    detected = incident.with_phase("detect", now - incident.at_s)
    record = replace(record, pause_s=max(record.pause_s, incident.pause_s))
    return Decision(record=record, incidents=(*story, detected), reason=incident.plan)


def reseat(world: World, now: float, policy: NodesPolicy) -> Decision:
    """Return the next generation, on other nodes. While a generation gathers (waits for its members), the incident that ended the previous
    generation is still open. The open incident may be the first effect of a lost node, so `bereft` adds the lost node to the incident."""
    settled_s = policy.grow_after_s if world.present.phase is Phase.RUN else None
    seats = rank_assignment.again(world, now, settled_s)
    back = [node for node, i in seats.members.items() if world.present.members.get(node, i) != i]
    reason = "; ".join(filter(None, (sentences.seats(seats), sentences.back(back))))
    record, story = _next(world, now, seats, reason, recoverable_state.step_reached(world))
    if world.present.phase is Phase.RUN:
        story = (*story, moved(world, seats, reason, now, recoverable_state.step_reached(world)))
    else:
        story = (*story, *bereft(world, seats, reason))
    return Decision(record=record, incidents=story, reason=reason)


def _next(
    world: World, now: float, seats: Seats, reason: str, reached: Step
) -> tuple[GenerationRecord, tuple[Incident, ...]]:
    """Return the next generation's record, and the incidents that change with it."""
    order, story = carried(world)
    before = world.present
    number = Generation(max(before.number, world.spec.given_up if world.spec else 0) + 1)
    known, there = rank_assignment.elders(world), {node.instance for node in world.nodes.values()}
    pauses = before.phase is Phase.GATHER and before.pauses(now) and len(seats.members) == len(before.members)
    record = GenerationRecord(
        number=number,
        phase=Phase.GATHER,
        members=seats.members,
        joined={
            n: before.joined.get(n, number)
            for n in seats.members
            if n not in known or n in before.joined  # the other members' memory holds only this lineage
        },
        new=tuple(node for node in seats.members if node not in known),
        left=tuple(sorted(known - seats.members.keys())),
        master_addr=world.present.master_addr,
        replay_until=Step(max(world.present.replay_until, reached)),
        trained=len(before.members) if any(s.stepped_s for s in world.statuses()) else before.trained,
        warmup_s=_warmup_s(world, len(seats.members)),
        turns=before.turns,
        reason=reason,
        opened_s=now,
        pause_s=before.opened_s + before.pause_s - now if pauses else 0.0,
        paused=world.present.paused,
        rewind=order,
        # The command deletes its request and the answer, once it has read the answer.
        snapshot=world.present.snapshot if any(r.id == world.present.snapshot for r in waiting(world)) else "",
        dismissed=tuple(instance for instance in world.present.dismissed if instance in there),
    )
    return record, story


def _warmup_s(world: World, members: int) -> float:
    """Return the longest warm-up that is known; 0 if it tells nothing of the next start: the command was given anew, perhaps with other
    arguments, or the next generation has more nodes."""
    if not world.begun or members > len(world.present.members):
        return 0.0
    return max(world.present.warmup_s, *(status.warmup_s for status in world.status.values()), 0.0)


def _turns(world: World) -> tuple[Turn, ...]:
    """Return all rewinds in place: first those that only the record contains, because etcd may have lost their incidents; then those of
    incidents."""
    told = turns(world.incidents)
    known = Counter(world.record.turns if world.record else ())
    return (*(known - Counter(told)).elements(), *told)
