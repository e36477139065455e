"""Orders + own state → the next local action. Pure: what this node owes the generation record, seen from wherever it stands now."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ...resilience.model.generation import GenerationRecord
from ...resilience.model.node import AckKind
from ...resilience.model.state_machine import Phase


class Action(Enum):
    WAIT = "nothing to do"
    CLEAR = "end what is left of an older generation, then say ready"
    LAUNCH = "start the ranks"
    SAY_RUNNING = "say that all ranks are attached"
    ORDER_REWIND = "tell the ranks to go back to a step"
    ORDER_PAUSE = "tell the ranks to wait at their next boundary, or to go on"
    ORDER_SNAPSHOT = "tell the ranks to take a snapshot for the disk"
    ORDER_LEAVE = "tell the ranks to leave at their next boundary, after a snapshot"
    PASS_SIGNAL = "stop the ranks as torchrun stops them: they may save by themselves, and run their handlers"
    END_GROUP = "end the ranks, finish the snapshots, say ended"
    STAND_DOWN = "end the ranks: the job goes on without them"
    LEAVE = "the job is over: leave"


@dataclass(frozen=True, kw_only=True)
class LocalState:
    instance: str
    group: int
    """Generation of the worker group that is here; 0: none."""
    group_over: bool
    """Its launcher has ended."""
    attached: bool
    """All its ranks are attached."""
    training: bool
    """All its ranks are in their loop, so that an order reaches them."""
    acked: tuple[int, AckKind | None]
    """Newest acknowledgement: generation and kind."""
    rewind: int
    """Number of the last order to go back that its pages tell; 0: none."""
    paused: bool
    """They tell the ranks to wait."""
    waiting: bool
    """All its ranks do: then those of all nodes are at the same boundary."""
    snapshot: str
    """The last request for a snapshot that its ranks were told of."""
    leave_ordered: bool
    grace_over: bool
    """The ranks have had the time that a last snapshot may take."""


def duty(record: GenerationRecord | None, me: LocalState) -> Action:
    """What to do next; the supervisor asks again after each action."""
    if record is None or me.instance not in record.members.values():
        # A record that names another instance is the one this agent's predecessor left, and the controller will open the next; or
        # the job goes on elsewhere, and ranks that are still here would train beside it.
        dismissed = record is not None and me.instance in record.dismissed
        if record is None or (record.phase is not Phase.ENDED and not dismissed and not 0 < me.group < record.number):
            return Action.WAIT
        if me.group:
            return Action.STAND_DOWN
        return Action.LEAVE if record.lets_go or not dismissed else Action.WAIT  # the job may yet want it
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
                return Action.WAIT  # the first ranks to leave may wait for the others in the script's tail
            if at_work and record.last_snapshot and me.training:
                return Action.ORDER_LEAVE
            return Action.PASS_SIGNAL if at_work and record.signal and me.attached else Action.END_GROUP
        case Phase.ENDED:
            return Action.LEAVE


def _order(record: GenerationRecord, me: LocalState) -> Action:
    """What the pages do not tell the ranks yet; they tell it until others take their place, and ranks obey each thing once."""
    if record.rewind is not None and record.rewind.number != me.rewind:
        return Action.ORDER_REWIND
    if record.waits != me.paused:
        return Action.ORDER_PAUSE
    # Before they all wait, one could be taken at an earlier boundary than the one they wait at, and that step be lost.
    if record.saves and record.saves != me.snapshot and me.training and (me.waiting or not record.moving):
        return Action.ORDER_SNAPSHOT
    return Action.WAIT
