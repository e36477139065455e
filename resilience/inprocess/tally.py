"""The judgement that every rank makes at a step boundary. All ranks judge identical numbers, so they agree without further communication.

Each rank contributes one row of numbers per step; an all-reduce by MAX turns the rows into the tally. The rule is pure: equal tallies give
equal directives.

A tally *seals* a snapshot (makes it restorable) if it says that every rank holds its whole part. Staging (the copy into shared memory) may
last past the next boundary (the moment between two steps). So a rank's row reports on the two snapshots that began last. All ranks report
on the same two snapshots: a rank that could not take a snapshot reports it as missed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple

from ..model.cause import Kind
from ..model.rewind import Remedy, Turn
from ..model.types import Order, Step
from . import loss_level
from .fallback import RescuePolicy
from .loss_level import Level
from .loss_spike import Figure, Finding, SpikePolicy
from .rewind_ladder import Answer, LadderPolicy, answer, replay_at_once

ROW = 14
"""Number of entries in a row: step, -step, loss, gradient norm, non-finite, the two latest snapshots, stride, wanted, order, fixed data,
rewind, -rewind, -pause."""
COURSE = "course"
"""Name of a snapshot's entry with the ranks' judgements so far. The entry `course` is not part of the training's own state."""
RANDOMNESS = "randomness"
"""Name of a snapshot's entry with what belongs to one rank only: its random generators, and those of its data."""
_NONE = -math.inf
"""Stands for a figure that a rank does not know. In the all-reduce by MAX, any other rank's figure wins."""


class Held(IntEnum):
    """How far a rank is with its part of a snapshot. The job's answer is the worst (largest) of all ranks' answers."""

    WHOLE = 0
    IN_PLACE = 1
    """The part is whole, but only for a rewind in place: a new process could not rebuild the state from it."""
    UNDER_WAY = 2
    MISSED = 3
    UNSAVABLE = 4
    """The rank missed this snapshot and will miss the next one too: its state now holds something that can't be saved."""


class Wanted(IntEnum):
    """Where a snapshot is wanted, in addition to its own node's memory. Ranks agree on it by MAX."""

    NOWHERE = 0
    COPIED = 1
    """In the memory of another node."""
    ON_DISK = 2
    """On disk, and also in another node's memory if copies are made."""


_HELD, _WANTED, _ORDERS = tuple(Held), tuple(Wanted), tuple(Order)
"""The members of each enumeration, indexed by value. Calling the enumeration, as in `Held(0)`, takes ten times as long."""


class Directive(Enum):
    GO_ON = "go on"
    REWIND = "rewind"
    LEAVE = "leave"
    GIVE_UP = "give up"
    DIVERGED = "diverged"
    """Ranks are not at the same step. No known fault causes this, so the worker group stops."""


class Tally(NamedTuple):
    """The reports of all ranks on one step, reduced to one. (This class and `Judgement` are tuples. A frozen dataclass of so many fields
    takes 4 µs to make, and 30 µs if a step has emptied the caches.)"""

    step: Step
    same_step: bool = True
    non_finite: int = 0
    """0: the step is finite; N: NaN or Inf began N - 1 steps before it. The greatest number of any rank."""
    newest: Held = Held.WHOLE
    """State of the latest snapshot begun."""
    earlier: Held = Held.WHOLE
    """State of the snapshot before it."""
    stride: int = 1
    """Number of steps from one snapshot to the next; every rank can afford snapshots this often."""
    wanted: Wanted = Wanted.NOWHERE
    """Where a requested snapshot is wanted."""
    order: Order = Order.NONE
    loss: float | None = None
    """The largest loss of any rank; None if it is not finite, or no rank reported a loss. The same holds for `grad_norm`."""
    grad_norm: float | None = None
    fixed_data: bool = False
    """At least one rank does not know the data of its steps, so the ranks cannot replay or skip data on purpose."""
    rewind: int = 0
    """Number of the rewind order that every rank has received and not obeyed. 0: there is none, or some ranks have not received it."""
    pause: bool = False
    """Whether every rank has received the order to pause."""

    @property
    def figure(self) -> Figure:
        return Figure(self.step, self.loss, self.grad_norm)


class Judgement(NamedTuple):
    directive: Directive
    finding: Finding | None = None
    """What is wrong: set with REWIND and GIVE_UP, and when ranks that only observe find a fault."""
    answer: Answer | None = None
    """What the ranks do about the finding, or would do if they did not only observe."""
    newest: Held = Held.UNDER_WAY
    """What is certain about the latest snapshot; `earlier`: about the snapshot before it. WHOLE: sealed; MISSED: given up; UNDER_WAY:
    neither."""
    earlier: Held = Held.UNDER_WAY
    stride: int = 1
    wanted: Wanted = Wanted.NOWHERE
    snapshot: bool = False
    """With LEAVE: take a snapshot on disk first."""
    rewind: int = 0
    """With GO_ON: number of a rewind order that all ranks have received. The ranks must check whether they can obey the order."""
    pause: bool = False
    """With GO_ON: wait before the next step."""
    level: Level = Level()
    """What is known of the losses after this step."""

    @property
    def waits(self) -> bool:
        """Whether the ranks wait for a loss to come back."""
        return self.answer is not None and self.answer.remedy is Remedy.WAIT


def row(said: Tally) -> tuple[float, ...]:
    """Return one rank's row, to be reduced by MAX. `same_step` is not part of the row."""
    numbers = (
        said.step,
        -said.step,
        _NONE if said.loss is None else said.loss,
        _NONE if said.grad_norm is None else said.grad_norm,
        said.non_finite,
        said.newest,
        said.earlier,
        said.stride,
        said.wanted,
        said.order,
        said.fixed_data,
        said.rewind,
        -said.rewind,
        -said.pause,
    )
    return tuple(map(float, numbers))


def tally(reduced: Sequence[float]) -> Tally:
    high, low, loss, grad_norm, non_finite, newest, earlier, stride, wanted, order, fixed_data, last, first, run = (
        reduced
    )
    return Tally(
        step=Step(int(high)),
        same_step=high == -low,
        non_finite=int(non_finite),
        newest=_HELD[int(newest)],
        earlier=_HELD[int(earlier)],
        stride=int(stride),
        wanted=_WANTED[int(wanted)],
        order=_ORDERS[int(order)],
        loss=loss if math.isfinite(loss) else None,
        grad_norm=grad_norm if math.isfinite(grad_norm) else None,
        fixed_data=bool(fixed_data),
        rewind=int(last) if last == -first else 0,
        pause=run < 0,
    )


@dataclass(frozen=True, kw_only=True)
class RankPolicy:
    """The policies that ranks apply when they judge, equal on all ranks."""

    spikes: SpikePolicy = SpikePolicy()
    ladder: LadderPolicy = LadderPolicy()
    observe: bool = False
    """Report what is wrong, and continue."""
    rescue: RescuePolicy = RescuePolicy()


def judge(
    said: Tally, before: Collection[Figure] | None, level: Level, turns: Sequence[Turn], policy: RankPolicy
) -> Judgement:
    """Return the judgement of a tally. before: the figures of the earlier steps, sorted by step; None: the tally does not report a new
    step. level: what is known of the losses before this step. turns: all rewinds of the job so far."""
    if not said.same_step and not policy.observe:
        return Judgement(directive=Directive.DIVERGED)
    found, after = _finding(said, before, level, policy.spikes)
    what = (
        answer(found, turns, policy.ladder, skippable=not said.fixed_data, rescue=policy.rescue.on) if found else None
    )
    if found and what and what.remedy is not Remedy.WAIT and not policy.observe:
        # This judgement seals no snapshot: the ranks do not continue from here.
        directive = Directive.GIVE_UP if what.remedy is Remedy.GIVE_UP else Directive.REWIND
        return Judgement(directive=directive, finding=found, answer=what, level=after)
    return Judgement(
        directive=Directive.GO_ON if said.order is Order.NONE else Directive.LEAVE,
        finding=found,
        answer=what,
        # The ranks never rewind to a state that is not finite, or whose parts are of different steps.
        newest=Held.MISSED if said.non_finite or not said.same_step else said.newest,
        earlier=said.earlier,
        stride=said.stride,
        wanted=said.wanted,
        snapshot=said.order is Order.SNAPSHOT_AND_STOP,
        rewind=said.rewind if said.order is Order.NONE else 0,
        pause=said.pause and said.order is Order.NONE,
        level=after,
    )


def blamed(judgement: Judgement, said: Tally, turns: Sequence[Turn], policy: LadderPolicy) -> Judgement:
    """Return what replaces `judgement` if hardware has likely caused a spike: the ranks rewind instead of waiting for the loss to come
    back."""
    found = judgement.finding
    if found is None or judgement.directive is not Directive.GO_ON:
        return judgement
    what = replay_at_once(found, turns, policy, skippable=not said.fixed_data)
    return (
        Judgement(directive=Directive.REWIND, finding=found, answer=what, level=judgement.level) if what else judgement
    )


def left_alone(said: Tally, judgement: Judgement) -> Judgement:
    """Return what replaces `judgement` if the NaN has done no harm: the ranks train on instead of rewinding."""
    return judge(said, None, judgement.level, (), RankPolicy(observe=True))._replace(
        finding=judgement.finding, answer=Answer(remedy=Remedy.LEAVE_ALONE)
    )


def _finding(
    said: Tally, before: Collection[Figure] | None, level: Level, policy: SpikePolicy
) -> tuple[Finding | None, Level]:
    began = Step(said.step + 1 - said.non_finite)
    if said.non_finite and level.watch:  # the state from before the spike is the last that is not suspected
        watch = level.watch
        onset = min(watch.onset, began)
        return Finding(kind=Kind.NON_FINITE, onset=onset, seen=said.step, expected=watch.expected), level
    if said.non_finite:
        return Finding(kind=Kind.NON_FINITE, onset=began, seen=said.step), level
    return (None, level) if before is None else loss_level.judge((*before, said.figure), level, policy)
