"""When memory is about to run out: what is left, sample by sample → how long it will last, and who grows. Pure.

    over each of the last 30, 120 and 300 s:  slope    Theil-Sen (the median of the slopes of all pairs: a few odd samples do not move it)
                                              steady   the medians of its thirds fall, the last drop at least half as deep as the one before
    short      it falls steadily over one of these times, and at that rate is gone within as long again

A start that fills its memory and stops is not steady, a saw-tooth (garbage, a page cache that is dropped) has no slope, and one that
falls slowly has its time. What is left is the machine's MemAvailable or what a control group's limit leaves, whichever is less
(`checkpoint/arena/memory_limits.py`): in a container the second is what kills.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median

SPANS_S = (30.0, 120.0, 300.0)
_POINTS = 30
"""Of one span that are looked at, evenly spread."""
_LEAST_POINTS = 9


@dataclass(frozen=True)
class Reading:
    """One look. Bytes."""

    at_s: float
    """Monotonic."""
    left: int
    used: Mapping[str, int] = field(default_factory=dict)
    """Resident, by whose: `rank 0`, `the agent`."""


@dataclass(frozen=True, kw_only=True)
class Short:
    left: int
    """Bytes,"""
    lasts_s: float
    """for so long,"""
    per_s: float
    """at so many bytes a second."""
    grows: str
    """Whose resident memory grows most; empty: nobody's that we know of."""
    grows_per_s: float


def short(readings: Sequence[Reading]) -> Short | None:
    """None: there is enough for now, as far as is known. readings: ascending."""
    return next((found for span_s in SPANS_S if (found := _within(readings, span_s))), None)


def _within(readings: Sequence[Reading], span_s: float) -> Short | None:
    recent = [reading for reading in readings if reading.at_s >= readings[-1].at_s - span_s]
    points = recent[:: max(1, len(recent) // _POINTS)]
    if len(points) < _LEAST_POINTS or readings[-1].at_s - recent[0].at_s < 0.8 * span_s:
        return None
    falling = -slope([(p.at_s, p.left) for p in points])
    lasts_s = recent[-1].left / falling if falling > 0 else float("inf")
    if lasts_s > span_s or not _steady([p.left for p in points]):
        return None
    growth = {who: slope([(p.at_s, p.used[who]) for p in points if who in p.used]) for who in points[-1].used}
    who = max(growth, key=lambda each: growth[each], default="")
    if not who or growth[who] < 0.2 * falling:
        who = ""
    return Short(
        left=recent[-1].left, lasts_s=lasts_s, per_s=falling, grows=who, grows_per_s=growth[who] if who else 0.0
    )


def over(readings: Sequence[Reading]) -> bool:
    """Whether a shortage has passed: over the last minute nothing has been taken away."""
    recent = [reading for reading in readings if reading.at_s >= readings[-1].at_s - 60.0]
    return len(recent) >= _LEAST_POINTS and slope([(r.at_s, r.left) for r in recent]) >= 0


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of a line through them (Theil-Sen), per second; 0 where there are not two."""
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if b[0] > a[0]]
    return median(slopes) if slopes else 0.0


def _steady(values: Sequence[float]) -> bool:
    third = len(values) // 3
    first, middle, last = (median(part) for part in (values[:third], values[third:-third], values[-third:]))
    return first > middle > last and middle - last >= 0.5 * (first - middle)
