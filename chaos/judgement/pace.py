"""How long a job takes to its first step, and between two steps. From what was seen of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from .history import Seen


def started_s(seen: Iterable[Seen]) -> float:
    """Return when all ranks had finished a first step; 0: they never had."""
    return next((each.at_s for each in seen if each.step > 0), 0.0)


def pause_s(before: Seen, seen: Sequence[Seen], until_s: float, last_step: int) -> float:
    """Return the longest time without a finished step from `before` until `until_s`, or until the training's last step.

    seen: what was seen from `before` on, an entry for each change. If several steps were finished between two looks, each of them took an
    equal part of the time.
    """
    longest, step, since_s = 0.0, before.step, before.at_s
    for each in seen:
        if step < each.step and step < last_step:
            longest = max(longest, (each.at_s - since_s) / (each.step - step))
            step, since_s = each.step, each.at_s
    return max(longest, until_s - since_s) if step < last_step else longest


def usual_pause_s(seen: Sequence[Seen]) -> float:
    """Return the longest time between two steps of a job without faults, after the first step."""
    stepping = [each for each in seen if each.step > 0]
    if not stepping:
        return 0.0
    return pause_s(stepping[0], stepping, math.inf, max(each.step for each in stepping))
