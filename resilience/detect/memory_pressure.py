"""Detect that memory is about to run out, how long the rest will last, and which process grows. Pure.

    over each of the last 30, 120 and 300 s:  slope    Theil-Sen (the median of the slopes of all pairs: a few outliers do not move it)
                                              steady   the medians of the span's thirds fall, the second time at least half as far
    short      memory falls steadily over one of these spans, and at that rate runs out within a span of the same length

A start that fills memory and then stops is no steady fall. A saw-tooth (garbage, a dropped page cache) has no slope. A slow fall leaves
enough time, so it is not reported. The memory left is the machine's MemAvailable or the rest of a control group's limit, whichever is less
(`checkpoint/arena/memory_limits.py`). In a container, the kernel kills a process at that limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median

from ..model.signals import Shortage

SPANS_S = (30.0, 120.0, 300.0)
_POINTS = 30
"""At least this many readings of a span are used, evenly spread, if the span has so many; fewer than twice as many are used."""
_LEAST_POINTS = 9


@dataclass(frozen=True)
class Reading:
    """One reading of the memory, in bytes."""

    at_s: float
    """Monotonic seconds."""
    left: int
    used: Mapping[str, int] = field(default_factory=dict)
    """Resident memory by process: `rank 0`, `the agent`."""


def short(readings: Sequence[Reading], wall_s: float) -> Shortage | None:
    """Return the shortage; None: as far as is known, memory is enough for now. readings: oldest first. wall_s: when it is found."""
    return next((found for span_s in SPANS_S if (found := _within(readings, span_s, wall_s))), None)


def _within(readings: Sequence[Reading], span_s: float, wall_s: float) -> Shortage | None:
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
    return Shortage(
        at_s=wall_s,
        left_bytes=recent[-1].left,
        lasts_s=round(lasts_s, 1),
        per_s=round(falling),
        grows=who,
        grows_per_s=round(growth[who]) if who else 0,
    )


def over(readings: Sequence[Reading]) -> bool:
    """Whether a shortage has passed: over the last minute, memory has not fallen."""
    recent = [reading for reading in readings if reading.at_s >= readings[-1].at_s - 60.0]
    return len(recent) >= _LEAST_POINTS and slope([(r.at_s, r.left) for r in recent]) >= 0


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope per second of a line through the points (Theil-Sen); 0 if there are fewer than two."""
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if b[0] > a[0]]
    return median(slopes) if slopes else 0.0


def _steady(values: Sequence[float]) -> bool:
    third = len(values) // 3
    first, middle, last = (median(part) for part in (values[:third], values[third:-third], values[-third:]))
    return first > middle > last and middle - last >= 0.5 * (first - middle)
