"""Durations, sizes, numbers and lists as people read them."""

from __future__ import annotations

from collections.abc import Sequence

from .terms import Rank
from .windows import Window

_READ = 16


def seconds(value: float) -> str:
    """A duration as people read it."""
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' if number != 1 else ''}"


def steps(number: int) -> str:
    return count(number, "step")


def size(number_bytes: int) -> str:
    """A size as people read it."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if number_bytes >= scale:
            return f"{number_bytes / scale:.1f} {unit}"
    return f"{number_bytes / 1e3:.0f} kB"


def few(things: Sequence[object]) -> list[str]:
    """As many as somebody reads, and how many more there are: of thousands of nodes, a fault may concern all."""
    more = len(things) - _READ
    return [str(thing) for thing in things] if more <= 1 else [*map(str, things[:_READ]), f"{more:,} more"]


def listed(things: Sequence[object]) -> str:
    *most, last = few(things)
    return f"{', '.join(most)} and {last}" if most else last


def batches(window: Window) -> str:
    last = window.stop - 1
    return f"batch {window.start}" if window.start == last else f"batches {window.start} to {last}"


def ranks(numbers: Sequence[Rank]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(few(numbers))}"
