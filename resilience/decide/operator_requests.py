"""Obeys an operator's requests: derives the record to write, incidents and answers from the World. Pure, and run at every tick.

    stop          an event of `state_machine`; answered when the job has ended
    drain         the same if the job needs the node; else `GenerationRecord.dismissed`, answered when the job continues without it
    rewind        an incident and `GenerationRecord.rewind`; answered when the ranks report that they have gone back
    pause         `GenerationRecord.paused`; answered when all ranks wait
    resume        `GenerationRecord.paused`; answered when no rank waits
    snapshot      `GenerationRecord.snapshot`; answered when the snapshot is on disk, or when it will not come soon
    readmit       the node's `Quarantine`, which is overwritten; answered at the same time

A request is pending until it is answered. Requests are obeyed one after the other. Only stop, drain, readmit and resume overtake others. A
drain that waits for another node does not delay other requests. The record and the incidents show what has been done about a request. No
controller keeps this in its own memory, so the next leader can continue in the middle.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from ..errors import MachineError, UsageError
from ..membership import quarantine, rank_assignment
from ..model.cluster_state import World
from ..model.generation import Decision, GenerationRecord, answered
from ..model.node import AckKind
from ..model.request import Answer, Request, Wish
from ..model.state_machine import Phase
from ..model.types import NodeId, Step
from ..text import formatting
from .rewind_orders import given_up, ordered

LEAVING = (Wish.STOP, Wish.DRAIN)
OVERTAKING = (*LEAVING, Wish.READMIT, Wish.RESUME)
"""Requests that do not wait for earlier ones."""
SAVE_S = 600.0
"""Seconds that an ordered snapshot may take to reach the disk while other orders wait for it."""
HURRY_S = 5.0
"""Seconds that the other agents may take to write their own parts of the last snapshot after an agent was lost (`cut_short`)."""


def waiting(world: World) -> list[Request]:
    return [request for request in world.requests if request.id not in world.answers]


def earlier(request: Request, world: World) -> Request | None:
    """Return the waiting request that must be carried out before this one; None: there is none."""
    if request.kind in OVERTAKING:
        return None
    first = next((each for each in waiting(world) if each.kind not in OVERTAKING), request)
    return first if first.id < request.id else None


def leaving(world: World, now: float) -> Request | None:
    """Return the request that ends the job now, if there is one. A drain ends the job only if the job cannot continue without the nodes of
    all waiting drains together. Waiting drains are judged together because a scheduler may take all their nodes at the same time. now:
    wall-clock seconds."""
    asked = [r for r in waiting(world) if r.kind in LEAVING and not _misled(r, world) and not _has_left(r, world)]
    stop = next((at for at, request in enumerate(asked) if request.kind == Wish.STOP), len(asked))
    drains = asked[:stop]
    if not _dispensable(drains, world, now):
        return drains[bisect_left(range(stop), True, key=lambda at: not _dispensable(drains[: at + 1], world, now))]
    return asked[stop] if stop < len(asked) else None


def cut_short(world: World) -> Decision:
    """Shorten the wait for a last snapshot if an agent was lost while the job ends before the end of its training. The lost agent's part of
    the snapshot will never be written, so the others need not wait for it."""
    record = world.record
    if record is None or record.phase is not Phase.ENDING or record.complete:
        return Decision()
    here = {node.instance for node in world.nodes.values()}
    done = {node for node, ack in world.acks.items() if ack.kind is AckKind.ENDED}
    gone = [node for node, instance in record.members.items() if instance not in here and node not in done]
    if not gone or 0 < record.leave_in_s <= HURRY_S:
        return Decision()
    reason = (
        f"{formatting.listed(gone)} {'is' if len(gone) == 1 else 'are'} gone before the end: the other nodes no longer wait "
        "for a last snapshot"
    )
    return Decision(record=replace(record, leave_in_s=HURRY_S), reason=reason)


def _dispensable(drains: Sequence[Request], world: World, now: float) -> bool:
    """Whether the job can continue without the nodes of these requests. With more requests, the answer can only change from yes to no."""
    record, spec = world.record, world.spec
    if not drains:
        return True
    if record is None or spec is None:
        return False
    here = [(request, node) for request in drains if (node := world.nodes.get(NodeId(request.node)))]
    if len(here) < len(drains) and spec.nodes == 1:
        return False
    dismissed = {*record.dismissed}
    fresh = [node.instance for _, node in here if node.instance not in dismissed]
    if not fresh and not (record.phase in (Phase.LAUNCH, Phase.RUN) and any(_pressed(r, record) for r, _ in here)):
        return True  # a node that is drained already waits until another one has come, if necessary
    without = replace(world, record=replace(record, dismissed=(*record.dismissed, *fresh)))
    return not rank_assignment.without(without, now).missed


def _pressed(request: Request, record: GenerationRecord) -> bool:
    """Whether the request's node trains and has no time to wait until another node replaces it."""
    return request.budget_s > 0 and request.node in record.members


def rule(world: World, now: float, reached: Step) -> Decision:
    """Return the next thing to do about the requests. now: wall-clock seconds; reached: the newest step that any rank has finished."""
    record = world.present
    asked = waiting(world)
    if record.over:
        return Decision(answers={r.id: a for r in asked if (a := _at_the_end(r, world, record, reached))})
    misled = {r.id: Answer(sentence=why, exit_code=UsageError.exit_code) for r in asked if (why := _misled(r, world))}
    if misled:
        return Decision(answers=misled)
    for request in asked:
        if request.kind == Wish.READMIT:
            return _readmit(request, world, now)
    goes_on = [request for request in asked if request.kind == Wish.RESUME]
    overtaken = [r.id for r in asked[: asked.index(goes_on[-1])] if r.kind == Wish.PAUSE] if goes_on else []
    if overtaken:
        early = Answer(sentence="the order to resume came before all ranks waited")
        return Decision(answers=dict.fromkeys(overtaken, early))
    if leaving(world, now):
        return Decision()  # an event of `state_machine` answers it
    drains = [request for request in asked if request.kind == Wish.DRAIN]
    if refused := {r.id: _KEEPS_ETCD for r in drains if _takes_etcd(r, world)}:
        return Decision(answers=refused)
    drained = _drained(drains, world)
    if drained or (drains and record.moving and not goes_on):
        return drained
    for request in (goes_on or [request for request in asked if request.kind != Wish.DRAIN])[:1]:
        return _JUDGES[Wish(request.kind)](request, world, now, reached)
    return given_up(world, now)


def _misled(request: Request, world: World) -> str:
    """Return why the request can never be obeyed; empty: no reason is known."""
    if request.kind not in tuple(Wish):
        return f"this version knows no request {request.kind!r}; nothing was done"
    # A request with an instance names a node that was present when the request was made, and may have left since.
    if request.kind == Wish.DRAIN and not request.instance and request.node not in {*world.members, *world.nodes}:
        return f"there is no node {request.node!r} in this job; it runs on {', '.join(formatting.few(world.members))}. Nothing was done"
    return ""


def _has_left(request: Request, world: World) -> bool:
    """Whether a new agent has replaced the agent to be drained: the request does not apply to the new agent."""
    here = world.nodes.get(NodeId(request.node)) if request.kind == Wish.DRAIN and request.instance else None
    return here is not None and here.instance != request.instance


def _at_the_end(request: Request, world: World, record: GenerationRecord, reached: Step) -> Answer | None:
    if request.kind in LEAVING:
        if record.phase is Phase.ENDING:
            return None
        kept = max((said.durable_steps[-1] for said in world.status.values() if said.durable_steps), default=-1)
        there = f"; the newest snapshot on disk is of step {kept}" if kept >= 0 else ""
        return Answer(sentence=f"the job has ended{there}", step=reached)
    return Answer(
        sentence=f"the job is ending ({record.reason}); nothing was done",
        exit_code=MachineError.exit_code,
        step=reached,
    )


# -- one function for each kind of request --------------------------------------------------------------------------------


_KEEPS_ETCD = Answer(
    sentence="this node runs the etcd of all nodes, so the job cannot continue without it; nothing was done. To end the job with a last "
    "snapshot: mt-resilient stop --last-snapshot",
    exit_code=UsageError.exit_code,
)


def _takes_etcd(request: Request, world: World) -> bool:
    """Whether this drain, ordered by an operator, would take away the etcd of all nodes. A scheduler takes the node in any case."""
    node = world.nodes.get(NodeId(request.node))
    return node is not None and node.hosts_etcd and not request.budget_s and not _has_left(request, world)


def _drained(asked: Sequence[Request], world: World) -> Decision:
    """Return the next thing to do about all drains together: one change of nodes, not one for each."""
    record = world.present
    dismissed = {*record.dismissed}
    fresh: dict[NodeId, Request] = {}
    for request in asked:
        node = world.nodes.get(NodeId(request.node))
        if node and node.instance not in dismissed and not _has_left(request, world):
            fresh.setdefault(NodeId(request.node), request)
    if fresh:
        are = f"node {next(iter(fresh))} is" if len(fresh) == 1 else f"nodes {formatting.listed([*fresh])} are"
        instances = (world.nodes[node].instance for node in fresh)
        reason = f"{are} drained by {next(iter(fresh.values())).by}"
        return Decision(record=replace(record, dismissed=(*record.dismissed, *instances)), reason=reason)
    on = f"the job continues on {formatting.listed([*record.members])}"
    answers: dict[str, Answer] = {}
    for request in asked:
        goes_on = record.phase is Phase.RUN or record.idle or _has_left(request, world)
        if request.node not in record.members and goes_on:
            answers[request.id] = Answer(sentence=f"node {request.node} is drained; {on}", step=record.resume_step)
        elif not request.instance and request.node not in world.nodes:
            why = f"the agent of {request.node} is gone: there is nothing to drain"
            answers[request.id] = Answer(sentence=why, exit_code=MachineError.exit_code)
        elif _has_left(request, world):
            why = f"the agent of {request.node} that was to be drained is gone, and another agent runs there now; {on}"
            answers[request.id] = Answer(sentence=why, exit_code=MachineError.exit_code)
    return Decision(answers=answers)


def _pause(request: Request, world: World, now: float, reached: Step) -> Decision:
    record = world.present
    if not record.paused:
        return Decision(record=replace(record, paused=True), reason=f"a pause, ordered by {request.by}")
    told = world.statuses()
    if told and all(said.paused for said in told):
        where = f"after step {reached}" if reached >= 0 else "before the first step"
        sentence = f"all ranks wait {where}; processes and memory stay as they are"
        return answered(request, sentence, reached)
    return Decision()


def _resume(request: Request, world: World, now: float, reached: Step) -> Decision:
    record = world.present
    if record.paused:
        return Decision(record=replace(record, paused=False), reason=f"the ranks resume, ordered by {request.by}")
    if any(said.paused for said in world.statuses()):
        return Decision()
    return answered(request, f"the ranks continue from step {max(reached, 0)}", reached)


def _snapshot(request: Request, world: World, now: float, reached: Step) -> Decision:
    record = world.present
    if record.snapshot != request.id:
        return Decision(record=replace(record, snapshot=request.id), reason=f"a snapshot, ordered by {request.by}")
    told = world.statuses()
    if not told or not all(said.snapshot == request.id and said.snapshot_step >= 0 for said in told):
        return Decision()
    there = set.intersection(*({*said.durable_steps} for said in told))
    since = [step for step in there if step >= max(said.snapshot_step for said in told)]
    if since:
        return answered(request, f"step {min(since)} is on disk", min(since))
    coming = all(said.snapshot_step in said.memory_steps for said in told)
    if not coming and (unsaved := next((said.unsaved for said in told if said.unsaved), "")):
        return answered(request, f"the state cannot be saved: {unsaved}", exit_code=MachineError.exit_code)
    held_up = any(each.kind not in OVERTAKING for each in waiting(world) if each.id > request.id)
    if held_up and now - request.at_s > SAVE_S:
        late = (
            f"it is not on disk after {formatting.seconds(SAVE_S)}, and another order waits. The agents still write it"
        )
        return answered(request, late, exit_code=MachineError.exit_code)
    return Decision()


def _readmit(request: Request, world: World, now: float) -> Decision:
    node, shut_out = NodeId(request.node), quarantine.in_force(world, now)
    if node not in shut_out:
        others = (
            f"{formatting.listed([*shut_out])} {'is' if len(shut_out) == 1 else 'are'}" if shut_out else "no node is"
        )
        return answered(
            request, f"node {node} is not in quarantine; {others}. Nothing was done", exit_code=UsageError.exit_code
        )
    entry = quarantine.readmitted(request.by, now)
    done = answered(request, f"node {node} may train again, and its earlier faults no longer count")
    return replace(done, quarantine={node: entry})


_JUDGES = {
    Wish.REWIND: ordered,
    Wish.PAUSE: _pause,
    Wish.RESUME: _resume,
    Wish.SNAPSHOT: _snapshot,
}
