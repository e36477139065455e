"""How far an iterator or a file has got that a loader holds. An iterator cannot be put back, and that it has moved on is to be said."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import suppress
from operator import length_hint
from types import GeneratorType
from typing import Any

from ...checkpoint.format.pytree_walk import PLAIN

_DEEP = 4
"""Iterators within iterators that are looked into."""


def progress(iterator: Any, deep: int = _DEEP) -> Any:
    """Something that compares equal as long as an iterator is not seen to move on. Nothing is taken from it."""
    if isinstance(iterator, GeneratorType):
        return _of_generator(iterator)
    if type(iterator).__module__ not in ("builtins", "itertools"):
        return 0
    try:
        if (left := length_hint(iterator, -1)) >= 0:
            return left
        return _of_parts(iterator.__reduce__()[1:], deep)
    except Exception:  # newer versions of Python do not take all of them apart
        return 0


def _of_generator(generator: Any) -> Any:
    frame = generator.gi_frame
    if frame is None:
        return None
    return frame.f_lasti, [value if type(value) in PLAIN else id(value) for value in frame.f_locals.values()]


def _of_parts(parts: Any, deep: int) -> Any:
    if isinstance(parts, tuple) and deep:
        return [_of_parts(part, deep - 1) for part in parts]
    if isinstance(parts, Iterator):
        return progress(parts, deep - 1)
    if isinstance(parts, (list, dict, set)):
        return len(parts)
    return parts if type(parts) in PLAIN else id(parts)


def is_read(value: Any) -> bool:
    """Whether it is a file that the script reads, at any place of it."""
    if not isinstance(value, io.IOBase):
        return False
    try:
        return value.readable() and value.seekable() and not value.writable()
    except Exception:  # closed, or of the script's own class
        return False


def position(file: Any) -> list[Any]:
    """Where it is read next; nothing where it is closed; None where it does not tell, as a text within `for line in file`."""
    try:
        return [] if file.closed else [file.tell()]
    except Exception:
        return [None]


def go_to(file: Any, position: list[Any]) -> None:
    if position and position[0] is not None:
        with suppress(OSError, ValueError):  # closed, or not of this length
            file.seek(position[0])
