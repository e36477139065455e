"""The path to a value in the state: the name of the source (the saved object) and the keys, as the script would write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Hidden:
    """A mark in a path: this many of the keys that follow are internal."""

    levels: int


def called(trail: Sequence[Any]) -> str:
    """Return the path as the script would write it."""
    name, *keys = place_of(trail)
    said = (f"[{key!r}]" if type(key) is str or (type(key) is int and abs(key) < 1 << 63) else "[…]" for key in keys)
    return f"{name}{''.join(said)}"[:300]


def place_of(trail: Sequence[Any]) -> list[Any]:
    """Return the name of the source and all keys of the path, without the internal keys."""
    found, hidden = [], 0
    for key in trail:
        if isinstance(key, Hidden):
            hidden = key.levels
        elif hidden:
            hidden -= 1
        else:
            found.append(key)
    return found
