"""The progress of an iterator or a file in a loader. An iterator can't be restored, so the rank has to report that it has advanced."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import suppress
from operator import length_hint
from types import GeneratorType
from typing import Any

from ...checkpoint.format.pytree_walk import PLAIN
from ..code_flow.frame_variables import values_in

_DEEP = 4
"""The deepest nesting of iterators that is searched."""


def progress(iterator: Any, deep: int = _DEEP) -> Any:
    """Return a value that stays equal until the iterator is seen to advance. The function takes no element from the iterator."""
    if isinstance(iterator, GeneratorType):
        if (frame := iterator.gi_frame) is None:
            return None
        return frame.f_lasti, [value if type(value) in PLAIN else id(value) for value in values_in(iterator)]
    if type(iterator).__module__ not in ("builtins", "itertools"):
        return 0
    try:
        if (left := length_hint(iterator, -1)) >= 0:
            return left
        return _of_parts(iterator.__reduce__()[1:], deep)
    except Exception:  # newer versions of Python don't report the state of every iterator
        return 0


def _of_parts(parts: Any, deep: int) -> Any:
    if isinstance(parts, tuple) and deep:
        return [_of_parts(part, deep - 1) for part in parts]
    if isinstance(parts, Iterator):
        return progress(parts, deep - 1)
    if isinstance(parts, (list, dict, set)):
        return len(parts)
    return parts if type(parts) in PLAIN else id(parts)


def is_read(value: Any) -> bool:
    """Return whether the value is a file that the script only reads, and that can be read from any position."""
    if not isinstance(value, io.IOBase):
        return False
    try:
        return value.readable() and value.seekable() and not value.writable()
    except Exception:  # the file is closed, or of the script's own class
        return False


def position(file: Any) -> list[Any]:
    """Return the position from which the file is read next. Empty: the file is closed. [None]: the position is not known, as for a text
    file inside `for line in file`."""
    try:
        return [] if file.closed else [file.tell()]
    except Exception:
        return [None]


def go_to(file: Any, position: list[Any]) -> None:
    if position and position[0] is not None:
        with suppress(OSError, ValueError):  # the file is closed, or has no such position
            file.seek(position[0])
