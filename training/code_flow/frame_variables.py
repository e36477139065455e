"""The variables of a running function or of a generator, read without disturbing the script.

Up to Python 3.12, a frame has one mapping for `frame.f_locals` and for the script's `locals()`. Reading `f_locals` writes the present
variables into this mapping. The script may have kept the mapping, and the frame keeps it in any case, with objects that the script drops.
So the mapping gets its earlier content back.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import sys
from contextlib import suppress
from types import CellType, FrameType, GeneratorType
from typing import Any

_WORD = ctypes.sizeof(ctypes.c_void_p)
_WORDS = 8
"""The number of pointers at the beginning of CPython's `_PyInterpreterFrame`. Its `f_locals` is among them."""


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Return the variables that a frame has now; empty if they can't be read without disturbing the script."""
    if sys.version_info >= (3, 13) or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return dict(frame.f_locals)
    try:
        before = dict(_mapping_of(frame))
    except LookupError:
        return {}
    held = frame.f_locals
    found = dict(held)
    held.clear()
    held.update(before)
    return found


def _mapping_of(frame: FrameType) -> dict[str, Any]:
    """Return the mapping that the frame holds for `f_locals`, before it is updated; empty if there is none yet. The frame's structure has
    the mapping right behind the globals and the builtins. Raises LookupError if the structure is another one."""
    structure = ctypes.c_void_p.from_address(id(frame) + object.__basicsize__ + _WORD).value
    words = [*(ctypes.c_void_p * _WORDS).from_address(structure or 0)] if structure else []
    around = [id(frame.f_globals), id(frame.f_builtins)]
    for at in range(len(words) - 2):
        if words[at : at + 2] == around:
            held = words[at + 2]
            return {} if held is None else ctypes.cast(held, ctypes.py_object).value
    raise LookupError


def values_in(generator: GeneratorType[Any, Any, Any]) -> list[Any]:
    """Return the values of a suspended generator's variables, and what else it refers to."""
    found = []
    for each in gc.get_referents(generator):
        with suppress(ValueError):  # the variable is not assigned yet
            found.append(each.cell_contents if type(each) is CellType else each)
    return found
