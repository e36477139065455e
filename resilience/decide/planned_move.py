"""A planned change of nodes, without a fault: derives the next thing to do from the World. Pure, and run at every tick while ranks train.

    wanted ──▶ `GenerationRecord.moving`: ranks wait at a step boundary, and save their state on disk ──▶ next generation, on other nodes

The reason is that a node is drained, or that a node has come back and the job may grow. No step is replayed for such a move. The record
shows what has been done, so the next leader can continue in the middle. A fault during the move opens the next generation at once. The job
does not grow then, and a drained node that is still present stays a member until the ranks train (`rank_assignment.again`).
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from ..membership import rank_assignment
from ..model.cluster_state import World
from ..model.generation import Decision
from ..model.state_machine import Phase
from ..plan.recoverable_state import saved
from ..text import sentences
from .policy import Policy
from .rewind_orders import pending

SAVE_S = 600.0
"""Maximum number of seconds that the ranks wait for their state to reach the disk. The next nodes can restore this state only from disk. If
the state does not reach the disk in time, the next nodes restore an older state."""
AGAIN_S = 3600.0
"""Seconds from a move whose state did not reach the disk until the job tries to grow again."""


class Move(Enum):
    NONE = "all are where they belong"
    BEGIN = "the ranks are to wait, and their state goes to disk"
    WAIT = "they do not all wait yet, or it is not on disk"
    GO = "the next generation may begin elsewhere"
    DROP = "the reason for the move is gone"
    LATE = "their state did not reach the disk"


def move(world: World, now: float, policy: Policy) -> tuple[Move, str]:
    """Return the next stage of a planned move, and the reason for the move. now: wall-clock seconds."""
    record = world.record
    if record is None or record.phase is not Phase.RUN:
        return Move.NONE, ""
    seats = rank_assignment.again(world, now, policy.nodes.grow_after_s)
    why = sentences.seats(seats)
    same = [*seats.members] == [*record.members] or bool(seats.missed)
    if not record.moving and same:
        return Move.NONE, ""
    forced = not {*record.dismissed}.isdisjoint(record.members.values())
    if not record.moving:
        told = world.statuses()
        at_work = len(told) == len(world.members) and all(
            s.stepped_s and not s.finished and not s.unsaved for s in told
        )
        failed = record.moving_s > 0 and now - record.moving_s < AGAIN_S
        begins = pending(world) is None and (forced or (at_work and not failed))
        return (Move.BEGIN, why) if begins else (Move.NONE, "")
    if same:
        return Move.DROP, why
    likely, waited_s = all(said.storage and not said.unsaved for said in world.statuses()), now - record.moving_s
    if saved(world):
        return Move.GO, why
    if waited_s <= (SAVE_S if likely else policy.recovery.in_place_s):
        return Move.WAIT, why
    return (Move.GO if forced else Move.LATE), why


def begun(world: World, now: float, policy: Policy) -> Decision:
    """Return what to write about a planned move while ranks train on the present nodes."""
    step, why = move(world, now, policy)
    back = world.record.rewind.number if world.record and world.record.rewind else 0
    if step is Move.BEGIN and world.record:
        record = replace(world.record, moving=why, moving_s=now, moving_after=back)
        return Decision(record=record, reason=f"all ranks wait: {why}")
    if step is Move.WAIT and world.record and world.record.moving_after != back and pending(world) is None:
        reason = "after a rewind, the ranks wait until the older state is on disk"
        return Decision(record=replace(world.record, moving_after=back), reason=reason)
    if step in (Move.DROP, Move.LATE) and world.record:
        tried_s = world.record.moving_s if step is Move.LATE else 0.0
        reason = f"the ranks continue on the same nodes: {step.value}"
        return Decision(record=replace(world.record, moving="", moving_s=tried_s), reason=reason)
    return Decision()
