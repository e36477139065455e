"""Decides what to write, from the World (all that the leader knows), the time and the policy: the next generation record and the changed
incidents, with the reason.

The decision is pure and level-triggered: the same World gives the same decision. Once a decision has been written, the next one is empty.
"""

from __future__ import annotations

from dataclasses import replace

from ..detect.registry import nodes_apart, suspect
from ..diagnose.root_cause import Verdict
from ..incidents.alerts import complaints_told, cut_off_told, frozen_told, shortages_told, stragglers_told
from ..incidents.lifecycle import convictions_told, open_incident, phases_told
from ..incidents.membership_changes import missed, missed_told
from ..incidents.rewinds import in_vain, rewinds_told
from ..incidents.sightings import sightings_told
from ..membership import rank_assignment, reachability
from ..model.cluster_state import World
from ..model.generation import Decision, GenerationRecord
from ..model.incident import Incident
from ..model.state_machine import TABLE, Event, Move, Phase
from ..model.types import Step
from ..plan import recoverable_state
from ..plan.escalation import REWIND_IN_PLACE, Plan, seated
from . import next_generation, node_exclusion, observe_only, planned_move
from .events import calm, event_of
from .operator_requests import cut_short, leaving, rule
from .policy import Policy
from .rewind_orders import coming_back, turn_back, unheeded


def decide(world: World, now: float, policy: Policy) -> Decision:
    """Return what to write next. now: wall-clock seconds."""
    if world.record is None or _starts_again(world, world.record):
        return next_generation.first(world, now, policy.nodes)
    # The record belongs to an earlier start of the job, whose incidents have been deleted. Only the end of that start must still be
    # written.
    if world.spec and world.spec.first_generation > world.record.number:
        world = replace(world, status={})
    read, before = world, {incident.id: incident for incident in world.incidents}
    world = _with_news(world, now, policy)
    event, verdict, answer = event_of(world, now, policy)
    shut_out = {} if policy.observe else node_exclusion.due(read, now, policy.quarantine, verdict)
    if shut_out:  # the next tick answers the fault, when the quarantine is in force
        return Decision(quarantine=shut_out)
    if policy.observe and verdict and answer and observe_only.only_told(verdict):
        world = world.with_incidents(
            observe_only.verdict_told(world, verdict, answer, recoverable_state.step_reached(world))
        )
        event, verdict, answer = calm(world, now, policy)
    told = tuple(i for i in world.incidents if (known := before.get(i.id)) is not i and known != i)
    decision = _answer(world, now, policy, event, verdict, answer)
    told = tuple({incident.id: incident for incident in (*told, *decision.incidents)}.values())
    ending = decision.record is not None and decision.record.over
    return replace(decision, incidents=_closed(world, told) if ending else told)


def _with_news(world: World, now: float, policy: Policy) -> World:
    """Return the World with the incidents that report findings. Such incidents do not depend on the answer to a fault."""
    if world.record and (len(world.record.members) > 1 or world.nodes.keys() - world.record.members.keys()):
        away = reachability.cut_off(world, now, policy.lease_s)
        world = world.with_incidents(cut_off_told(world, away, reachability.unseen(world, now, policy.lease_s)))
        world = replace(world, nodes=reachability.standing_in(world, away)) if away else world
    world = world.with_incidents(rewinds_told(world, policy.ladder))
    world = world.with_incidents(frozen_told(world))
    world = world.with_incidents(stragglers_told(world))
    world = world.with_incidents(shortages_told(world, policy.observe))
    world = world.with_incidents(complaints_told(world))
    world = world.with_incidents(missed_told(world, missed(world, now)))
    world = world.with_incidents(convictions_told(phases_told(world), world))
    world = world.with_incidents(sightings_told(world, policy.ladder, policy.observe))
    if policy.observe:
        world = world.with_incidents(observe_only.hangs_over(world))
    return world


def _answer(
    world: World, now: float, policy: Policy, event: Event | None, verdict: Verdict | None, answer: Plan | None
) -> Decision:
    """Return what to write about the event, and about requests if there is no event."""
    present = world.present
    late = None if leaving(world, now) else unheeded(world, now, policy.recovery.in_place_s) or coming_back(world)
    if late and present.phase in (Phase.LAUNCH, Phase.RUN):
        seats = rank_assignment.again(world, now)
        if not rank_assignment.will_do(world, seats.members, now):
            return Decision()
        return next_generation.reopen(world.with_incidents((late,)), now, late, seats)
    move, phase = TABLE[present.phase, event] if event else (Move.IGNORE, present.phase)
    if event is None or move is Move.IGNORE:
        ruling = cut_short(world) or _wrong_at_the_end(world) or rule(world, now, recoverable_state.step_reached(world))
        ruling = ruling or planned_move.begun(world, now, policy)
        return replace(ruling, said="" if ruling.incidents else ruling.reason)
    if verdict and answer:
        reached = recoverable_state.step_reached(world)
        incident = open_incident(world, verdict, answer, reached)
        judged = world.with_incidents((incident,))
        seats = rank_assignment.again(judged, now, struck=verdict.early)
        if move is Move.REOPEN and not answer.unfit and not rank_assignment.will_do(world, seats.members, now):
            # All agents had died, and too few nodes have come back for any number of nodes that is allowed now.
            return rule(world, now, reached)
        answer = seated(answer, seats, len(seats.members) in (len(world.members), *rank_assignment.left(judged, now)))
        incident = replace(incident, rung=answer.rung, plan=answer.reason, pause_s=answer.pause_s)
        if move is Move.REOPEN and answer.rung == REWIND_IN_PLACE:
            seen_s = max(s.at_s for s in verdict.blamed)
            return turn_back(world, replace(incident, at_s=seen_s), recoverable_state.sound(world, verdict.onset))
        tried = in_vain(world, verdict, policy.ladder)
        if move is Move.REOPEN:
            opened = next_generation.reopen(world, now, incident, seats)
            return replace(opened, incidents=(*tried, *opened.incidents))
        reason = f"{incident.summary}; {answer.reason}"
        record = replace(present, phase=phase, exit_code=answer.exit_code, reason=reason, onset=_wrong_since(world))
        return Decision(record=record, incidents=(*tried, incident), reason=answer.reason)
    if answer:
        record = replace(
            present, phase=phase, exit_code=answer.exit_code, reason=answer.reason, onset=_wrong_since(world)
        )
        return Decision(record=record, reason=answer.reason)
    if event is Event.MEMBERS:
        return next_generation.reseat(world, now, policy.nodes)
    decision = next_generation.advance(world, now, event, phase, policy.observe)
    if phase is Phase.ENDING and decision.record:
        return replace(decision, record=replace(decision.record, onset=_wrong_since(world)))
    return decision


def _wrong_at_the_end(world: World) -> Decision:
    """Return the record with the onset of a fault that is found while the job ends before the end of its training. A later start of the job
    must not resume from that step or a later one."""
    record = world.record
    if record is None or record.phase is not Phase.ENDING or record.complete:
        return Decision()
    since = _wrong_since(world)
    if since < 0 or 0 <= record.onset <= since:
        return Decision()
    reason = f"from step {since} on, the nodes hold different bits: no later start may resume from there"
    return Decision(record=replace(record, onset=since), reason=reason)


def _wrong_since(world: World) -> Step:
    """Return the first computed step that is known to be wrong, from suspicions and unanswered incidents; -1: no step is. If the job ends,
    a later start must not resume from that step or a later one."""
    suspected = (*suspect(world), *nodes_apart(world))
    known = (*(suspicion.onset for suspicion in suspected), recoverable_state.onset(world))
    return min((step for step in known if step >= 0), default=Step(-1))


def _closed(world: World, told: tuple[Incident, ...]) -> tuple[Incident, ...]:
    """Return the incidents in `told` and all open incidents, and close them: no recovery continues while the job ends."""
    changed = {incident.id for incident in told}
    newest = world.with_incidents(told).incidents
    return tuple(replace(i, open=False) for i in newest if i.open or i.id in changed)


def _starts_again(world: World, last: GenerationRecord) -> bool:
    """Whether the job was over, and its command has been given again."""
    return last.phase is Phase.ENDED and world.spec is not None and world.spec.first_generation > last.number
