"""An adapter (`Kind`): how a snapshot takes apart the values of some types, and rebuilds them.

value → content (what the value consists of: values of the same and other types) → an equal value, or the live value, filled.
"""

from __future__ import annotations

import copyreg
import ctypes
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


@dataclass(frozen=True)
class Kind:
    name: str
    types: tuple[type, ...]
    save: Callable[[Any], Any]
    """Returns the content of a value: the values that it consists of."""
    make: Callable[[Any], Any]
    """Returns the value with this content. For a kind with `fill`, `make` returns an empty value, because the content is not rebuilt
    yet."""
    fill: Callable[[Any, Any], None] | None = None
    """Puts content into a live value. None: such values never change, so a restore uses an equal value instead."""
    fits: Callable[[Any, Any], bool] = lambda live, content: True
    """Returns whether a live value can be filled with this content."""
    moves: bool = False
    """Whether the values change but can't be filled. A restore replaces such a value by an equal one, everywhere it was."""
    hidden: int = 0
    """The number of levels of the content that are internal and have no names in the script."""


def constant(name: str, kinds: type | tuple[type, ...], save: Callable[[Any], Any], make: Callable[[Any], Any]) -> Kind:
    """Return the adapter for a type whose values never change."""
    return Kind(name, kinds if isinstance(kinds, tuple) else (kinds,), save, make)


def fill_pairs(live: Any, content: Any) -> None:
    dict.clear(live)
    dict.update(live, content)


def fill_ordered(live: Any, content: Any) -> None:
    OrderedDict.clear(live)
    for key, value in content.items():
        OrderedDict.__setitem__(live, key, value)


def fill_list(live: Any, content: Any) -> None:
    list.__setitem__(live, slice(None), content)


def fill_attributes(live: Any, content: Any) -> None:
    if content is not vars(live):
        fill_pairs(vars(live), content)


def never_deleted(thing: Any) -> None:
    """Keep an object alive forever if its class has a `__del__`, which would do harm in a copy, or in an object without attributes."""
    if hasattr(type(thing), "__del__"):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def class_of(value: Any) -> Any:
    """Return the value's class, for look-ups that are cached by class."""
    return type(value)


@cache
def is_source(kind: Any) -> bool:
    """Return whether objects of this class have a state of their own, and a way to restore it."""
    return issubclass(kind, (torch.nn.Module, torch.optim.Optimizer)) or has_state_dict(kind)


def has_state_dict(kind: type) -> bool:
    return hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")


@cache
def slots_of(kind: Any) -> list[str]:
    return list(copyreg._slotnames(kind))  # type: ignore[attr-defined]


def slot_values(value: Any) -> dict[str, Any]:
    """Return the attributes that an object has in its slots."""
    kind: Any = type(value)
    return {name: getattr(value, name) for name in slots_of(kind) if hasattr(value, name)}
