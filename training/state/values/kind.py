"""How a snapshot takes apart values of one kind, and makes them again.

value → content (what it consists of: values of this and other kinds) → an equal value, or the live one filled.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Kind:
    name: str
    types: tuple[type, ...]
    save: Callable[[Any], Any]
    """Returns what a value consists of."""
    make: Callable[[Any], Any]
    """Returns the value of this content. With `fill`, it returns an empty value: the content has not been made again yet."""
    fill: Callable[[Any, Any], None] | None = None
    """Puts content into a live value. None: such values never change, so an equal one takes its place."""
    fits: Callable[[Any, Any], bool] = lambda live, content: True
    """Whether a live value can be filled with this content."""
    hidden: int = 0
    """This many levels of the content are internal, and have no names in the script."""


def constant(name: str, kinds: type | tuple[type, ...], save: Callable[[Any], Any], make: Callable[[Any], Any]) -> Kind:
    """Return the kind of values that never change."""
    return Kind(name=name, types=kinds if isinstance(kinds, tuple) else (kinds,), save=save, make=make)


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
        vars(live).clear()
        vars(live).update(content)


def never_deleted(thing: Any) -> None:
    """Keep the thing alive forever if its class has a `__del__`: for a copy, or an object without attributes, that would do harm."""
    if hasattr(type(thing), "__del__"):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


@cache
def is_source(kind: Any) -> bool:
    """Return whether things of this class have a state of their own, and a way to restore it."""
    return issubclass(kind, (torch.nn.Module, torch.optim.Optimizer)) or has_state_dict(kind)


def has_state_dict(kind: type) -> bool:
    return hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")
