"""Decides what a node does next, from the generation record and the node's own state. Pure functions that the agent, the scenarios and the
simulator share.

generation record, LocalState ──`duty`──▶ the action that is due ──`step`, with Begun──▶ sequence of actions ──▶ the executor
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

from ...resilience.decide.planned_move import SAVE_S
from ...resilience.model.generation import GenerationRecord
from ...resilience.model.node import AckKind
from ...resilience.model.state_machine import Phase

LONG_S = 10.0
"""Seconds that the last snapshots may take until the agent reports that it waits for them."""


class Action(Enum):
    WAIT = "nothing to do"
    CLEAR = "end what is left of an older generation, and find the state that the next one can resume from"
    SAY_READY = "say that nothing is left of older generations"
    FETCH = "ask another node for this node's part of the state"
    START_COLD = "wait no longer for the warm process"
    LAUNCH = "start the ranks"
    SAY_RUNNING = "say that all ranks are attached"
    ORDER_REWIND = "tell the ranks to go back to a step"
    ORDER_PAUSE = "tell the ranks to wait at their next boundary, or to continue"
    ORDER_SNAPSHOT = "tell the ranks to take a snapshot for the disk"
    ORDER_LEAVE = "tell the ranks to exit at their next boundary, after a snapshot"
    PASS_SIGNAL = "stop the ranks as torchrun stops them: they may save by themselves, and run their handlers"
    END_GROUP = "end the ranks: the job starts no others"
    LET_GO = "discard all state from the record's onset on"
    FINISH_WRITING = "write the snapshots that must be on disk, and no others"
    TELL_WAITING = "report which writes the end of the job waits for"
    GIVE_UP_WRITING = "exit without the snapshots that are not on disk yet"
    WRITE_AGAIN = "the job continues after all: write snapshots to disk again"
    SAY_ENDED = "say that this node has nothing left to do"
    STAND_DOWN = "end the ranks: the job continues without them"
    LEAVE = "the job is over: exit"


@dataclass(frozen=True, kw_only=True)
class LocalState:
    instance: str
    group: int
    """Generation of the worker group on this node; 0: none."""
    group_over: bool
    """The worker group's launcher has ended."""
    attached: bool
    """All ranks of the worker group are attached."""
    training: bool
    """All its ranks are in their training loop, so that they obey an order."""
    acked: tuple[int, AckKind | None]
    """Newest acknowledgement: generation and kind."""
    rewind: int
    """Number of the last rewind order on its ranks' pages (shared memory); 0: none."""
    paused: bool
    """The ranks' pages order the ranks to wait (a pause)."""
    waiting: bool
    """All ranks of this node wait in a pause, so the ranks of all nodes are at the same step boundary."""
    snapshot: str
    """The last snapshot request that was passed on to its ranks."""
    importing: bool = False
    """The warm process is still importing. Soon ranks can be forked from it."""
    written: bool = True
    """The drain process has written all snapshots, or was given up."""
    hurry: bool = False
    """This agent was asked to exit: it waits for the job's end for a limited time only."""
    leave_ordered: bool = False
    grace_over: bool = False
    """The ranks have used up the time for a last snapshot. `step` sets this field and `leave_ordered`."""


@dataclass(frozen=True, kw_only=True)
class Begun:
    """What this node has begun and not finished. Times are monotonic seconds; 0: not begun."""

    awaited: int = 0
    """Number of the generation whose start waits for the warm process."""
    awaited_s: float = 0.0
    """Since when that start waits."""
    fetched: int = 0
    """Number of the generation for which this node has requested its part of the state from another node."""
    ordered_s: float = 0.0
    """When the ranks were ordered to exit."""
    until_s: float = 0.0
    """The time by which they must have exited."""
    leave_in_s: float = 0.0
    """The last time limit for exiting that the record gave, in seconds."""
    leave_by_s: float = math.inf
    """The time at which that limit ends."""
    finishing_s: float = 0.0
    """Since when the last snapshots are being written."""
    let_go: int = -1
    """The first wrong step (onset) from which all snapshots were discarded; -1: none were."""
    told: bool = False
    """The agent has reported which writes the end of the job waits for."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Time limits in seconds."""

    warm_s: float
    """Seconds that a start waits for the warm process. If the warm process takes longer, a cold start is quicker."""
    leave_s: float
    """Seconds that ranks may take to exit, and then the drain process to write. A deadline in the record replaces this limit."""


def step(
    record: GenerationRecord, me: LocalState, begun: Begun, now_s: float, patience: Patience
) -> tuple[Begun, tuple[Action, ...]]:
    """Return the new Begun, and the actions to do, one after another. After them, the next call may return more. No action: wait, or exit
    if `duty` says so. now_s: monotonic."""
    if record.leave_in_s and record.leave_in_s != begun.leave_in_s:
        by_s = min(begun.leave_by_s, now_s + record.leave_in_s)
        begun = replace(begun, leave_in_s=record.leave_in_s, leave_by_s=by_s)
    ordered = begun.ordered_s > 0
    action = duty(record, replace(me, leave_ordered=ordered, grace_over=ordered and now_s > begun.until_s))
    match action:
        case Action.WAIT | Action.LEAVE:
            return begun, ()
        case Action.CLEAR:  # perhaps a node has died while the job was ending
            again = (Action.WRITE_AGAIN,) if begun.finishing_s else ()
            return Begun(fetched=begun.fetched), (*again, Action.CLEAR, Action.SAY_READY)
        case Action.LAUNCH:
            return _launch(record, me, begun, now_s, patience)
        case Action.PASS_SIGNAL | Action.ORDER_LEAVE:
            # ORDER_LEAVE gets half of the time until a deadline. The other half is for writing the snapshots in memory to disk.
            share = 2 if action is Action.ORDER_LEAVE else 1
            left_s = (begun.leave_by_s - now_s) / share if record.leave_in_s else patience.leave_s
            return replace(begun, ordered_s=now_s, until_s=now_s + left_s), (action,)
        case Action.END_GROUP:
            return _end(record, me, begun, now_s, patience)
    return begun, (action,)


def _launch(
    record: GenerationRecord, me: LocalState, begun: Begun, now_s: float, patience: Patience
) -> tuple[Begun, tuple[Action, ...]]:
    lacking = any(record.members.get(node) == me.instance for node in record.sources)
    if lacking and begun.fetched != record.number:
        return replace(begun, fetched=record.number), (Action.FETCH,)
    if not me.importing:
        return begun, (Action.LAUNCH,)
    if begun.awaited != record.number:
        return replace(begun, awaited=record.number, awaited_s=now_s), ()
    return begun, () if now_s - begun.awaited_s < patience.warm_s else (Action.START_COLD, Action.LAUNCH)


def _end(
    record: GenerationRecord, me: LocalState, begun: Begun, now_s: float, patience: Patience
) -> tuple[Begun, tuple[Action, ...]]:
    """Return the next action at the end of the job: end the ranks, then write the snapshots that must be on disk, then acknowledge."""
    if not begun.finishing_s:
        begun = replace(begun, finishing_s=now_s, let_go=record.onset)
        return begun, (Action.END_GROUP, Action.LET_GO, Action.FINISH_WRITING)
    if record.onset != begun.let_go:
        return replace(begun, let_go=record.onset), (Action.LET_GO,)
    if me.written:
        return begun, (Action.SAY_ENDED,)
    drained = record.last_snapshot and not record.complete and record.exit_code == 0
    grace_s = SAVE_S if drained else patience.leave_s
    if record.leave_in_s:
        grace_s = max(0.0, begun.leave_by_s - begun.finishing_s)
    hurry = me.hurry or drained or record.exit_code != 0 or record.leave_in_s > 0
    took_s = now_s - begun.finishing_s
    if hurry and took_s > grace_s:
        return begun, (Action.GIVE_UP_WRITING,)
    if not begun.told and took_s > LONG_S:
        return replace(begun, told=True), (Action.TELL_WAITING,)
    return begun, ()


def duty(record: GenerationRecord | None, me: LocalState) -> Action:
    """Return the action that is due on this node under `record`, in its present state."""
    if record is None or me.instance not in record.members.values():
        # If the record names this node's earlier agent, the controller will begin the next generation. If the job continues on other nodes,
        # ranks that are still here must stop training.
        dismissed = record is not None and me.instance in record.dismissed
        if record is None or (record.phase is not Phase.ENDED and not dismissed and not 0 < me.group < record.number):
            return Action.WAIT
        if me.group:
            return Action.STAND_DOWN
        return Action.LEAVE if record.lets_go or not dismissed else Action.WAIT  # the job may still need this node
    acked = me.acked[1] if me.acked[0] == record.number else None
    match record.phase:
        case Phase.GATHER:
            return Action.WAIT if acked is AckKind.READY and not me.group else Action.CLEAR
        case Phase.LAUNCH | Phase.RUN:
            if me.group != record.number:
                return Action.LAUNCH
            if me.attached and acked is not AckKind.RUNNING:
                return Action.SAY_RUNNING
            return _order(record, me)
        case Phase.ENDING:
            if acked is AckKind.ENDED:
                return Action.WAIT
            at_work = me.group and not me.group_over and not me.grace_over
            if at_work and me.leave_ordered:
                return Action.WAIT  # the ranks that exit first may wait for the others after their loop
            if at_work and record.last_snapshot and me.training:
                return Action.ORDER_LEAVE
            return Action.PASS_SIGNAL if at_work and record.signal and me.attached else Action.END_GROUP
        case Phase.ENDED:
            return Action.LEAVE


def _order(record: GenerationRecord, me: LocalState) -> Action:
    """Return the action that writes the next missing order on the ranks' pages. An order stays there until another replaces it. Ranks obey
    it once."""
    order = record.rewind
    if order is not None and not order.left and order.number != me.rewind:  # `left`: new ranks start from there
        return Action.ORDER_REWIND
    if record.waits != me.paused:
        return Action.ORDER_PAUSE
    # If not all ranks waited, the snapshot could be taken at an earlier boundary than the pause, and the step between would be lost.
    if record.saves and record.saves != me.snapshot and me.training and (me.waiting or not record.moving):
        return Action.ORDER_SNAPSHOT
    return Action.WAIT
