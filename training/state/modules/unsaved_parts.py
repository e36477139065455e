"""Parts of attributes that no snapshot stores, because each start of the script recreates them: functions without a name, locks, loggers,
objects that belong to one process.

A snapshot stores the other parts of a list, a mapping or a script's object: `defaultdict(lambda: 0.0)` keeps its counts in a recovery. The
snapshot identifies an unsaved part by the attribute that had it when the loop began, and by the part's number in that attribute.
"""

from __future__ import annotations

import functools
import io
import logging
import sys
import threading
import types
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor
from typing import Any

import numpy as np
import torch

from ....checkpoint.format.pytree_walk import PLAIN
from ...attach.rank_stderr import say
from ...warm.side_effects import is_scripts
from ..values.class_adapters import OBJECT, has_a_name, kind_of
from ..values.kind import is_source
from ..values.sharded_tensors import is_sharded
from ..values.type_adapters import is_bound
from .attribute_rules import FRAMEWORKS, WRAPPERS, is_by_name, is_constant

_OF_A_PROCESS = (
    logging.Logger,
    threading.Thread,
    Executor,
    types.ModuleType,
    torch.utils.hooks.RemovableHandle,
    io.IOBase,
)
_LEVELS = 12
_MOST = 10_000
"""The most parts of one attribute that are searched."""


class Reports:
    """Reports about attributes that a recovery does not restore, one for each key."""

    def __init__(self) -> None:
        self._told: set[Any] = set()

    def say(self, key: Any, text: str) -> None:
        if key not in self._told:
            self._told.add(key)
            say(text)

    def not_kept(self, key: Any, called: str, why: str, any_more: str = "") -> None:
        self.say(key, f"{called} is not kept{any_more}, and a recovery continues with another value: {why}")


def note(stays: dict[str, Any], path: str, held: Mapping[str, Any]) -> None:
    """Add to `stays` the unsaved parts of the attributes `held`, which belong to the module at `path`."""
    for name, value in held.items():
        for number, part in enumerate(() if is_constant(value) else parts_that_stay(value)):
            stays[f"part {number} of {path}.{name}"] = part


def parts_that_stay(value: Any) -> list[Any]:
    """Return the unsaved parts of a value, in the order of the walk."""
    found: list[Any] = []
    seen: set[int] = set()

    def down(each: Any, level: int) -> None:
        if type(each) in PLAIN or id(each) in seen or len(seen) > _MOST:
            return
        seen.add(id(each))
        if level and _stays(each):
            found.append(each)
        elif level < _LEVELS:
            for part in _within(each):
                down(part, level + 1)

    down(value, 0)
    return found


def moves(value: Any) -> bool:
    """Whether the value changes with each use but no snapshot can store it: an iterator, or an array of a numpy subclass."""
    kind: Any = type(value)
    if isinstance(value, np.ndarray):
        return kind is not np.ndarray
    return hasattr(kind, "__next__") and kind_of(kind) is None and not (isinstance(value, io.IOBase) or is_source(kind))


def why_unsaved(value: Any) -> str:
    """Return the reason why no snapshot stores an attribute's new value; empty for values that the rank does not report. It reports no
    objects of frameworks and of Python's own library, most of which belong to one process, such as events and context managers."""
    kind: Any = type(value)
    root = kind.__module__.partition(".")[0]
    known = root in FRAMEWORKS or root in WRAPPERS or (root in sys.stdlib_module_names and not isinstance(value, tuple))
    return "" if known or isinstance(value, _OF_A_PROCESS) else f"it is a {kind.__module__}.{kind.__qualname__}"


def _stays(value: Any) -> bool:
    kind: Any = type(value)
    if is_by_name(kind):
        return not (is_bound(value) or has_a_name(value))
    if isinstance(value, _OF_A_PROCESS):
        return True
    if isinstance(value, (torch.Tensor, np.ndarray)) or is_source(kind) or is_sharded(kind):
        return False
    container = isinstance(value, (dict, list, tuple, deque, set, frozenset))
    return kind_of(kind) is None and not container and not moves(value)


def _within(value: Any) -> Iterator[Any]:
    kind: Any = type(value)
    if isinstance(value, defaultdict):
        yield value.default_factory
    if isinstance(value, (dict, list, tuple, deque)):
        held: Iterable[Any] = value.values() if isinstance(value, dict) else value
        if not PLAIN.issuperset(map(type, held)):
            yield from held
    if kind is functools.partial:
        yield from (value.func, *value.args, *value.keywords.values())
    elif is_scripts(kind.__module__) and not is_source(kind) and (known := kind_of(kind)) and known.name == OBJECT:
        yield from vars(value).values() if hasattr(value, "__dict__") else ()
