"""The judgement that all ranks make at a step boundary, from identical numbers, so that they agree without another word.

Each rank contributes one row per step; an all-reduce by MAX makes the tally. The rule is pure: equal tallies, equal directives.
A snapshot staged at a step is *sealed* by the tally of that very step: all ranks staged it, and the figures of the step are finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from .signals import Order, Step

ROW = 5
"""Numbers in a contribution: step, -step, non-finite, not staged, order."""


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
    same_step: bool
    non_finite: bool
    staged: bool
    """Every rank staged its part."""
    order: Order


@dataclass(frozen=True, kw_only=True)
class Judgement:
    directive: Directive
    seal: bool
    """Seal the snapshot of `step`."""
    step: Step
    snapshot: bool = False
    """With LEAVE: take a durable snapshot first."""


def row(step: int, finite: bool, staged: bool, order: int) -> tuple[float, ...]:
    """One rank's contribution, all of it meant for MAX."""
    return (float(step), float(-step), float(not finite), float(not staged), float(order))


def tally(reduced: Sequence[float]) -> Tally:
    high, low, non_finite, unstaged, order = reduced
    return Tally(
        step=Step(int(high)),
        same_step=high == -low,
        non_finite=bool(non_finite),
        staged=not unstaged,
        order=Order(int(order)),
    )


def judge(said: Tally, replays: int, max_replays: int) -> Judgement:
    """`replays`: how often the ranks have already gone back because of this very step."""
    if not said.same_step:
        return Judgement(directive=Directive.DIVERGED, seal=False, step=said.step)
    if said.non_finite:
        directive = Directive.REWIND if replays < max_replays else Directive.GIVE_UP
        return Judgement(directive=directive, seal=False, step=said.step)
    leave = said.order is not Order.NONE
    return Judgement(
        directive=Directive.LEAVE if leave else Directive.GO_ON,
        seal=said.staged,
        step=said.step,
        snapshot=said.order is Order.SNAPSHOT_AND_STOP,
    )
