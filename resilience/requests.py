"""What becomes of an operator's requests: World → the record as it is to be, incidents, answers. Pure, and asked at every tick.

    stop, drain   are an event of `machine`; answered when the job has ended
    rewind        an incident and `GenerationRecord.rewind`; answered when the ranks say that they have gone back
    pause         `GenerationRecord.paused`; answered when all ranks wait
    resume        likewise
    snapshot      `GenerationRecord.snapshot`; answered when it is on disk

A request stands until it is answered. They are taken in turn, one at a time; only leaving, and going on after a pause, overtake. What has
been done about a request is read off the record and the incidents, never remembered: whoever leads next goes on in the middle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from . import assignment, describe
from .chronicle import next_id
from .errors import MachineError, SnapshotError, UsageError
from .machine import Phase
from .orders import GenerationRecord, Incident, RewindOrder
from .recovery import OBSERVE, RESTART_GANG, REWIND_IN_PLACE
from .stability import common_steps
from .terms import NodeId, OrderedBy, Step
from .wishes import Answer, Request, Wish
from .world import World

LEAVING = (Wish.STOP, Wish.DRAIN)


@dataclass(frozen=True, kw_only=True)
class Ruling:
    record: GenerationRecord | None = None
    """Changed by a request; None: it stays."""
    incidents: tuple[Incident, ...] = ()
    answers: dict[str, Answer] = field(default_factory=dict)
    """By request."""
    reason: str = ""


def waiting(world: World) -> list[Request]:
    return [request for request in world.requests if request.id not in world.answers]


def leaving(world: World) -> Request | None:
    """The request to end the job here that is to be obeyed, if there is one. Nodes that the job can do without are drained otherwise: if
    it can do without all of them, for a scheduler may take away all at once, and has no time for one after the other."""
    drained: list[NodeId] = []
    for request in waiting(world):
        if request.kind not in LEAVING or _misled(request, world):
            continue
        if request.kind == Wish.STOP:
            return request
        drained.append(NodeId(request.node))
        if not _dispensable(drained, world):
            return request
    return None


def _dispensable(nodes: Sequence[NodeId], world: World) -> bool:
    """Whether the job can go on without these, of which the last was asked for last."""
    record = world.record
    if record is None or world.spec is None:
        return False
    if nodes[-1] not in world.nodes:
        return max(world.spec.sizes) + world.spec.spares > 1
    if world.nodes[nodes[-1]].instance in record.dismissed:
        return True
    instances = tuple(world.nodes[node].instance for node in nodes if node in world.nodes)
    without = replace(record, dismissed=(*record.dismissed, *instances))
    return not assignment.again(replace(world, record=without), now=0.0).missed


def rule(world: World, now: float, reached: Step) -> Ruling:
    """The next thing to do about what is asked. now: wall-clock seconds; reached: the newest step that any rank has finished."""
    record = world.record
    assert record
    asked = waiting(world)
    if record.phase in (Phase.ENDING, Phase.ENDED):
        return Ruling(answers={r.id: a for r in asked if (a := _at_the_end(r, world, record, reached))})
    misled = {r.id: Answer(sentence=why, exit_code=UsageError.exit_code) for r in asked if (why := _misled(r, world))}
    if misled:
        return Ruling(answers=misled)
    if any(r.kind == Wish.RESUME for r in asked):
        overtaken = [r.id for r in asked if r.kind == Wish.PAUSE]
        if overtaken and record.paused:
            return Ruling(
                answers={
                    each: Answer(sentence="the ranks were told to go on before all of them waited")
                    for each in overtaken
                }
            )
        asked = [r for r in asked if r.kind == Wish.RESUME]
    for request in asked[:1]:
        return _JUDGES[Wish(request.kind)](request, world, now, reached)
    return _given_up(world, record)


def _misled(request: Request, world: World) -> str:
    """Why nothing can ever be done about it; empty: something can."""
    if request.kind not in tuple(Wish):
        return f"this version knows no request {request.kind!r}; nothing was done"
    before = world.record is None or request.at_s > world.record.opened_s  # later, it has been drained
    if request.kind == Wish.DRAIN and before and request.node not in {*world.members, *world.nodes}:
        return f"there is no node {request.node!r} in this job; it runs on {', '.join(describe.few(world.members))}. Nothing was done"
    return ""


def _at_the_end(request: Request, world: World, record: GenerationRecord, reached: Step) -> Answer | None:
    if request.kind in LEAVING:
        if record.phase is Phase.ENDING:
            return None
        return Answer(
            sentence=f"the job has ended after step {reached}" if reached >= 0 else "the job has ended", step=reached
        )
    return Answer(
        sentence=f"the job is ending ({record.reason}); nothing was done",
        exit_code=MachineError.exit_code,
        step=reached,
    )


# -- one for each wish ----------------------------------------------------------------------------------------------------


def _leave(request: Request, world: World, now: float, reached: Step) -> Ruling:
    record = world.record
    assert record
    if request.kind == Wish.STOP or leaving(world):
        return Ruling()  # an event of the machine's
    asked = [NodeId(r.node) for r in waiting(world) if r.kind == Wish.DRAIN and r.node in world.nodes]
    nodes = [node for node in dict.fromkeys(asked) if world.nodes[node].instance not in record.dismissed]
    if nodes:  # together: one change of nodes, not one for each
        are = f"node {nodes[0]} is" if len(nodes) == 1 else f"nodes {describe.listed(nodes)} are"
        instances = (world.nodes[node].instance for node in nodes)
        reason = f"{are} drained by {request.by}"
        return Ruling(record=replace(record, dismissed=(*record.dismissed, *instances)), reason=reason)
    if request.node in record.members or record.phase is not Phase.RUN:
        return Ruling()
    sentence = f"node {request.node} is drained; the job goes on on {describe.listed([*record.members])}"
    return Ruling(answers={request.id: Answer(sentence=sentence, step=record.resume_step)})


def _rewind(request: Request, world: World, now: float, reached: Step) -> Ruling:
    record = world.record
    assert record
    incident = next((i for i in world.incidents if i.signature == signature(request)), None)
    if incident is None:
        if pending(world) is not None:
            return Ruling()
        why = _cannot(request, world)
        if why:
            return Ruling(answers={request.id: Answer(sentence=why, exit_code=UsageError.exit_code)})
        return _order(request, world, record, now, reached)
    if incident.remedy:
        return Ruling(answers={request.id: Answer(sentence=describe.gone_back(incident), step=request.step)})
    if not incident.open:
        return Ruling(answers={request.id: Answer(sentence=incident.plan, exit_code=SnapshotError.exit_code)})
    return _given_up(world, record)


def _cannot(request: Request, world: World) -> str:
    """Why the ranks cannot go back so; empty where they can."""
    kept = sorted(common_steps(list(world.status.values())))
    if request.step not in kept:
        near = [*[s for s in kept if s < request.step][-1:], *[s for s in kept if s > request.step][:1]]
        known = f"the nearest {'is' if len(near) == 1 else 'are'} {describe.listed(near)}" if near else "none is"
        return f"no state of step {request.step} is kept: {known}. Nothing was done"
    if not request.skip or (all(said.skips for said in world.statuses()) and world.statuses()):
        return ""
    if all(said.stepped_s for said in world.statuses()) and world.statuses():
        return "this script cannot leave data out: it does not take its batches by session.data_step. Nothing was done"
    return "whether this script can leave data out is known once its ranks have done a step: ask again then. Nothing was done"


def _order(request: Request, world: World, record: GenerationRecord, now: float, reached: Step) -> Ruling:
    ident = next_id(world)
    live = record.phase is not Phase.GATHER
    incident = Incident(
        id=ident,
        generation=record.number,
        cause=OrderedBy.OPERATOR,
        rung=REWIND_IN_PLACE if live else RESTART_GANG,
        summary=f"a rewind to step {request.step} is ordered by {request.by}",
        plan=describe.ordered(request.step, request.skip, live),
        at_s=now,
        step_at_fault=reached,
        started=reached >= 0,
        signature=signature(request),
    )
    order = RewindOrder(number=int(ident), to=request.step, skip=request.skip)
    return Ruling(record=replace(record, rewind=order), incidents=(incident,), reason=incident.plan)


def signature(request: Request) -> str:
    return f"{OrderedBy.OPERATOR}:{request.id}"


def _pause(request: Request, world: World, now: float, reached: Step) -> Ruling:
    record = world.record
    assert record
    if not record.paused:
        return Ruling(record=replace(record, paused=True), reason=f"a pause, ordered by {request.by}")
    if _all(said.paused for said in world.statuses()):
        where = f"after step {reached}" if reached >= 0 else "before the first step"
        sentence = f"all ranks wait {where}; processes and memory stay as they are"
        return Ruling(answers={request.id: Answer(sentence=sentence, step=reached)})
    return Ruling()


def _resume(request: Request, world: World, now: float, reached: Step) -> Ruling:
    record = world.record
    assert record
    if record.paused:
        return Ruling(record=replace(record, paused=False), reason=f"on with the training, ordered by {request.by}")
    if any(said.paused for said in world.statuses()):
        return Ruling()
    return Ruling(answers={request.id: Answer(sentence=f"the ranks go on from step {max(reached, 0)}", step=reached)})


def _snapshot(request: Request, world: World, now: float, reached: Step) -> Ruling:
    record = world.record
    assert record
    if record.snapshot != request.id:
        return Ruling(record=replace(record, snapshot=request.id), reason=f"a snapshot, ordered by {request.by}")
    told = world.statuses()
    if not _all(said.snapshot == request.id and said.snapshot_step >= 0 for said in told):
        return Ruling()
    there = set.intersection(*({*said.durable_steps} for said in told))
    since = [step for step in there if step >= max(said.snapshot_step for said in told)]
    if not since:
        return Ruling()
    return Ruling(answers={request.id: Answer(sentence=f"step {min(since)} is on disk", step=min(since))})


_JUDGES = {
    Wish.STOP: _leave,
    Wish.DRAIN: _leave,
    Wish.REWIND: _rewind,
    Wish.PAUSE: _pause,
    Wish.RESUME: _resume,
    Wish.SNAPSHOT: _snapshot,
}


def _all(answers: Iterable[bool]) -> bool:
    """Whether there are any, and all say yes."""
    said: Sequence[bool] = list(answers)
    return bool(said) and all(said)


# -- an order that waits ----------------------------------------------------------------------------------------------------


def pending(world: World) -> RewindOrder | None:
    """The order to go back that nobody has obeyed yet."""
    order = (world.record.rewind or world.record.begins) if world.record else None
    if order is None:
        return None
    incident = next((i for i in world.incidents if i.id == order.incident), None)
    return order if incident is not None and incident.open and not incident.remedy else None


def _given_up(world: World, record: GenerationRecord) -> Ruling:
    """The ranks have said that they cannot go back as ordered."""
    order = pending(world)
    if order is None or order.cause is not OrderedBy.OPERATOR:
        return Ruling()
    if not any(said.declined == order.number for said in world.statuses()):
        return Ruling()
    return Ruling(record=replace(record, rewind=None), incidents=(lost(world, order),))


def lost(world: World, order: RewindOrder) -> Incident:
    """The story of an order that cannot be obeyed any more."""
    incident = next(i for i in world.incidents if i.id == order.incident)
    why = f"the state of step {order.to} is not kept any more; the training goes on as it was"
    return replace(incident, open=False, rung=OBSERVE, plan=why)


def carried(world: World) -> tuple[RewindOrder | None, tuple[Incident, ...]]:
    """Into the next generation: the order that waits, and its incident, for the next ranks begin where these were to go back."""
    order = pending(world)
    if order is None:
        return None, ()
    incident = next(i for i in world.incidents if i.id == order.incident)
    if order.cause is OrderedBy.COMPARISON:  # its onset says where the next ones may begin
        return None, (replace(incident, rung=RESTART_GANG),)
    return order, (replace(incident, rung=RESTART_GANG, plan=describe.ordered(order.to, order.skip, live=False)),)


def turn_back(world: World, incident: Incident, to: Step) -> Ruling:
    """All ranks go back in place, to a state from before what the comparison of replicas has found."""
    assert world.record
    order = RewindOrder(number=int(incident.id), to=to, cause=OrderedBy.COMPARISON)
    return Ruling(record=replace(world.record, rewind=order), incidents=(incident,), reason=incident.plan)


def unheeded(world: World, now: float, patience_s: float) -> Incident | None:
    """What the ranks were to go back for in place, and have not in time, or cannot: the gang has to be started again."""
    order = pending(world)
    if order is None or order.cause is not OrderedBy.COMPARISON:
        return None
    incident = next(i for i in world.incidents if i.id == order.incident)
    cannot = any(s.declined == order.number or s.finished or s.stopped for s in world.statuses())
    if not cannot and now - incident.at_s <= patience_s:
        return None
    why = "they cannot" if cannot else f"they did not within {describe.seconds(patience_s)}"
    plan = (
        f"all ranks were to go back in place, and {why}: end the gang, start it again from before step {incident.onset}"
    )
    return replace(incident, rung=RESTART_GANG, plan=plan)
