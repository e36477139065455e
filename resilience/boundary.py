"""The judgement that all ranks make at a step boundary, from identical numbers, so that they agree without another word.

Each rank contributes one row per step; an all-reduce by MAX makes the tally. The rule is pure: equal tallies, equal directives.

A snapshot is *sealed* by a tally that says that every rank holds it whole. Copies may take longer than to the next boundary, so a row
tells of the two latest snapshots that were begun: always the same two on all ranks, for a rank that could not take one has missed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum

from .signals import Order, Step

ROW = 8
"""Numbers in a contribution: step, -step, non-finite, the two latest snapshots, stride, durable, order."""


class Held(IntEnum):
    """How far a rank is with a snapshot. The worst of all ranks' answers is the job's."""

    WHOLE = 0
    UNDER_WAY = 1
    MISSED = 2
    UNSAVABLE = 3
    """Missed, and so will the next one be: the state has come to hold something that can't be saved."""


class Directive(Enum):
    GO_ON = "go on"
    REWIND = "rewind"
    LEAVE = "leave"
    GIVE_UP = "give up"
    DIVERGED = "diverged"
    """Ranks are not at the same step: never by a fault we know, so it stops the gang."""


@dataclass(frozen=True, kw_only=True)
class Tally:
    """What all ranks together said of one step."""

    step: Step
    same_step: bool = True
    non_finite: bool = False
    newest: Held = Held.WHOLE
    """The latest snapshot that was begun,"""
    earlier: Held = Held.WHOLE
    """and the one before it."""
    stride: int = 1
    """Steps from one snapshot to the next that every rank can afford."""
    durable: bool = False
    """A snapshot on disk is asked for."""
    order: Order = Order.NONE


@dataclass(frozen=True, kw_only=True)
class Judgement:
    directive: Directive
    step: Step
    newest: Held = Held.UNDER_WAY
    """What is certain of the two latest snapshots: WHOLE is sealed, MISSED given up, UNDER_WAY waited for."""
    earlier: Held = Held.UNDER_WAY
    stride: int = 1
    durable: bool = False
    snapshot: bool = False
    """With LEAVE: take a durable snapshot first."""


def row(said: Tally) -> tuple[float, ...]:
    """One rank's contribution (its `same_step` is not asked), all of it meant for MAX."""
    numbers = (
        said.step,
        -said.step,
        said.non_finite,
        said.newest,
        said.earlier,
        said.stride,
        said.durable,
        said.order,
    )
    return tuple(map(float, numbers))


def tally(reduced: Sequence[float]) -> Tally:
    high, low, non_finite, newest, earlier, stride, durable, order = reduced
    return Tally(
        step=Step(int(high)),
        same_step=high == -low,
        non_finite=bool(non_finite),
        newest=Held(int(newest)),
        earlier=Held(int(earlier)),
        stride=int(stride),
        durable=bool(durable),
        order=Order(int(order)),
    )


def judge(said: Tally, replays: int, max_replays: int) -> Judgement:
    """`replays`: how often the ranks have already gone back because of this very step."""
    if not said.same_step:
        return Judgement(directive=Directive.DIVERGED, step=said.step)
    if said.non_finite:  # and nothing is sealed by it: the ranks do not go on from here
        directive = Directive.REWIND if replays < max_replays else Directive.GIVE_UP
        return Judgement(directive=directive, step=said.step)
    return Judgement(
        directive=Directive.GO_ON if said.order is Order.NONE else Directive.LEAVE,
        step=said.step,
        newest=said.newest,
        earlier=said.earlier,
        stride=said.stride,
        durable=said.durable,
        snapshot=said.order is Order.SNAPSHOT_AND_STOP,
    )
