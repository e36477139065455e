"""The judgement that all ranks make at a step boundary, from identical numbers, so that they agree without another word.

Each rank contributes one row per step; an all-reduce by MAX makes the tally. The rule is pure: equal tallies, equal directives.

A snapshot is *sealed* by a tally that says that every rank holds it whole. Copies may take longer than to the next boundary, so a row
tells of the two latest snapshots that were begun: always the same two on all ranks, for a rank that could not take one has missed it.
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
from .fallback import RescuePolicy
from .loss_spike import Figure, Finding, SpikePolicy, spike
from .rewind_ladder import Answer, LadderPolicy, answer

ROW = 14
"""Numbers in a contribution: step, -step, loss, gradient norm, and what mostly stays as it is from step to step: non-finite, the two latest
snapshots, stride, wanted, order, fixed data, rewind, -rewind, -pause."""
REST = 4
"""Where in a row the latter begins. Tallies with equal rests, whose figures are no spike, are judged alike."""
COURSE = "course"
"""Name, in a snapshot, of what the ranks have judged so far: no part of the training's own state."""
RANDOMNESS = "randomness"
"""And of what is a rank's alone: its generators, and those of its data."""
_NONE = -math.inf
"""A figure that a rank does not know: any other rank's is more."""


class Held(IntEnum):
    """How far a rank is with a snapshot. The worst of all ranks' answers is the job's."""

    WHOLE = 0
    IN_PLACE = 1
    """Whole, for a rewind in place: no new process could make what it is of."""
    UNDER_WAY = 2
    MISSED = 3
    UNSAVABLE = 4
    """Missed, and so will the next one be: the state has come to hold something that can't be saved."""


class Wanted(IntEnum):
    """Where a snapshot is wanted beside the memory of its own node. Ranks agree on it by MAX."""

    NOWHERE = 0
    COPIED = 1
    """In the memory of another node;"""
    ON_DISK = 2
    """on disk, and where copies are made, there too."""


_HELD, _WANTED, _ORDERS = tuple(Held), tuple(Wanted), tuple(Order)
"""By value; calling the enumeration takes ten times as long."""


class Directive(Enum):
    GO_ON = "go on"
    REWIND = "rewind"
    LEAVE = "leave"
    GIVE_UP = "give up"
    DIVERGED = "diverged"
    """Ranks are not at the same step: never by a fault we know, so it stops the worker group."""


class Tally(NamedTuple):
    """What all ranks together said of one step. (Tuples, this and the next: a frozen dataclass of so many fields takes 4 µs to make, and
    30 where a step has emptied the caches.)"""

    step: Step
    same_step: bool = True
    non_finite: bool = False
    newest: Held = Held.WHOLE
    """The latest snapshot that was begun,"""
    earlier: Held = Held.WHOLE
    """and the one before it."""
    stride: int = 1
    """Steps from one snapshot to the next that every rank can afford."""
    wanted: Wanted = Wanted.NOWHERE
    """A snapshot that is asked for."""
    order: Order = Order.NONE
    loss: float | None = None
    """The largest that any rank gave; None where no rank gave a finite one. So the norm of the gradient."""
    grad_norm: float | None = None
    fixed_data: bool = False
    """Of some rank it is not known which data its steps use: none can be used again on purpose, and none left out."""
    rewind: int = 0
    """Number of the order to go back that every rank has been given, and has not obeyed; 0: there is none, or not yet everywhere."""
    pause: bool = False
    """Every rank has been told to wait."""

    @property
    def figure(self) -> Figure:
        return Figure(self.step, self.loss, self.grad_norm)


class Judgement(NamedTuple):
    directive: Directive
    finding: Finding | None = None
    """With REWIND and GIVE_UP, and where ranks only observe: what is wrong,"""
    answer: Answer | None = None
    """and what is done, or would be, about it."""
    newest: Held = Held.UNDER_WAY
    """What is certain of the two latest snapshots: WHOLE is sealed, MISSED given up, UNDER_WAY waited for."""
    earlier: Held = Held.UNDER_WAY
    stride: int = 1
    wanted: Wanted = Wanted.NOWHERE
    snapshot: bool = False
    """With LEAVE: take a durable snapshot first."""
    rewind: int = 0
    """With GO_ON: number of an order to go back that all ranks have, and of which they have to see whether they can."""
    pause: bool = False
    """With GO_ON: wait before the next step."""

    @property
    def calm(self) -> bool:
        """Nothing is to be done about this step, beyond what becomes of its snapshots."""
        return self.directive is Directive.GO_ON and not (self.finding or self.wanted or self.rewind or self.pause)


def row(said: Tally) -> tuple[float, ...]:
    """One rank's contribution (its `same_step` is not asked), all of it meant for MAX."""
    return (*head(said.step, said.loss, said.grad_norm), *rest(said))


def head(step: int, loss: float | None, grad_norm: float | None) -> tuple[float, ...]:
    """What in a row is another number at each step."""
    return step, -step, _NONE if loss is None else loss, _NONE if grad_norm is None else grad_norm


def rest(said: Tally) -> tuple[float, ...]:
    """And what mostly is not."""
    numbers = (
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
        non_finite=bool(non_finite),
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
    """What ranks judge by, the same on all of them."""

    spikes: SpikePolicy = SpikePolicy()
    ladder: LadderPolicy = LadderPolicy()
    observe: bool = False
    """Say what is wrong, and go on all the same."""
    rescue: RescuePolicy = RescuePolicy()


def judge(said: Tally, before: Collection[Figure], turns: Sequence[Turn], policy: RankPolicy) -> Judgement:
    """before: the figures of the steps before, ascending; turns: all rewinds of the job so far."""
    if not said.same_step and not policy.observe:
        return Judgement(directive=Directive.DIVERGED)
    found = _finding(said, before, policy.spikes)
    what = (
        answer(found, turns, policy.ladder, skippable=not said.fixed_data, rescue=policy.rescue.on) if found else None
    )
    if found and what and not policy.observe:  # and nothing is sealed by it: the ranks do not go on from here
        directive = Directive.GIVE_UP if what.remedy is Remedy.GIVE_UP else Directive.REWIND
        return Judgement(directive=directive, finding=found, answer=what)
    return Judgement(
        directive=Directive.GO_ON if said.order is Order.NONE else Directive.LEAVE,
        finding=found,
        answer=what,
        # What is not finite, or not of one step, is no state to go back to.
        newest=Held.MISSED if said.non_finite or not said.same_step else said.newest,
        earlier=said.earlier,
        stride=said.stride,
        wanted=said.wanted,
        snapshot=said.order is Order.SNAPSHOT_AND_STOP,
        rewind=said.rewind if said.order is Order.NONE else 0,
        pause=said.pause and said.order is Order.NONE,
    )


def _finding(said: Tally, before: Collection[Figure], policy: SpikePolicy) -> Finding | None:
    if said.non_finite:
        return Finding(kind=Kind.NON_FINITE, onset=said.step, seen=said.step)
    return spike((*before, said.figure), policy)
