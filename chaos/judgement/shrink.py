"""Shrinks a list of faults that makes something fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def shrunk(items: tuple[T, ...], fails: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """Return as few of `items`, in their order, as still fail: leaving out any further one does not. fails: tries a shorter tuple."""
    for place in reversed(range(len(items))):
        smaller = items[:place] + items[place + 1 :]
        if fails(smaller):
            return shrunk(smaller, fails)
    return items
