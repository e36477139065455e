"""Variables that the script's training loop carries from step to step, and no snapshot holds: they are named once.

Which these are follows from the loop's byte code: what it may read of the step before, since it has not set it yet in this one, and what it
changes in place. Random generators are kept: `script_generators.py`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from types import FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from ...checkpoint.format.pytree_walk import PLAIN
from ...resilience.clock import monotonic_s, wall_s
from ..data.script_code import installed, is_own
from .loop_code import SOME, Carried, carried_in
from .script_generators import attributes, is_scripts, part_at, variables_of

_CLOCKS = (wall_s, monotonic_s, time.perf_counter)
_JUST_NOW_S = 60.0
"""What a clock gave so lately is a time that the loop measures from."""
_FILLED = (list, dict, set, deque, torch.Tensor, np.ndarray)
_CHANGES = frozenset(
    (
        *(
            "append",
            "appendleft",
            "extend",
            "extendleft",
            "insert",
            "pop",
            "popleft",
            "popitem",
            "remove",
            "sort",
            "reverse",
            "rotate",
        ),
        *("add", "discard", "update", "setdefault", "subtract", "__setitem__"),
    )
)
"""Methods of lists, sets, mappings and the like."""
_FLAGS = frozenset(("requires_grad_", "share_memory_", "detach_"))
_FOR_THE_EYE = re.compile(r"log|writ|timer|profil|progress|print|stopwatch|^p?bar$", re.IGNORECASE)
"""In names of classes, and of variables that are None yet."""
_REACHED = 5000
"""Objects that the Session holds, of which the loop may use one by a name of its own."""


def moved_on(frame: FrameType | None, held: Iterable[Any] = ()) -> list[str]:
    """Variables that the loop of the script takes from one step to the next, and no snapshot holds. held: what the Session holds."""
    while frame is not None and not is_scripts(frame):
        frame = frame.f_back
    if frame is None:
        return []
    around = {**frame.f_globals, **variables_of(frame)}
    found = carried_in(frame.f_code, frame.f_lasti)
    known = _reached(held) if found else frozenset()
    return [*dict.fromkeys(name for each in found if (name := _named(each, around, known)))]


def _reached(held: Iterable[Any]) -> Collection[int]:
    """Ids of the objects within, those of few steps first."""
    found: dict[int, Any] = {}
    waiting = deque(held)
    while waiting and len(found) < _REACHED:
        each = waiting.popleft()
        kind: Any = type(each)
        if id(each) in found or kind in PLAIN or issubclass(kind, (type, ModuleType, FunctionType)):
            continue
        found[id(each)] = each
        if not issubclass(kind, (torch.Tensor, np.ndarray)):
            waiting.extend(attributes(each).values())
        if issubclass(kind, (list, tuple, set, deque, dict)):
            waiting.extend(each.values() if issubclass(kind, dict) else each)
    return found.keys()


def _named(carried: Carried, around: dict[str, Any], known: Collection[int]) -> str:
    """What a sentence calls it; empty: it is no state, or the Session has it."""
    path, method, anew = carried
    name, *steps = path
    if method is None and not steps:
        unmade = around.get(name) is None and _FOR_THE_EYE.search(name)  # a writer that the loop makes
        return name if name in around and not unmade and _is_state(around[name], anew, known) else ""
    value, label, whole = around.get(name), name, False
    for step in steps[:-1]:
        if not _may_change(value, known):
            return ""
        value = _part(value, step)
        whole = whole or step[0] == "["
        label += "" if whole else f".{step[1]}"
    if not _may_change(value, known):
        return ""
    if method is None:
        kind, key = steps[-1]
        if kind == "[":
            return label if isinstance(value, _FILLED) else ""
        if isinstance(value, _FILLED) or not _is_state(_part(value, steps[-1]), anew, known):
            return ""
        return f"{label}.{key}"
    if isinstance(value, torch.Tensor) and method.endswith("_") and not method.endswith("__"):
        return label if method not in _FLAGS else ""
    if isinstance(value, _FILLED) and method in _CHANGES:
        return label
    own: Any = type(value)
    return label if is_own(value) and _changes_itself(own, method) else ""


def _part(value: Any, step: tuple[str, Any]) -> Any:
    kind, key = step
    if step == SOME:
        return next(iter(value.values() if isinstance(value, dict) else value), None)
    found = part_at(value, step)
    if found is None and kind == "." and not isinstance(value, type):
        found = inspect.getattr_static(type(value), key, None)
    return found


def _may_change(value: Any, known: Collection[int]) -> bool:
    """Whether it is the script's to keep, and the Session does not."""
    kind: Any = type(value)
    if id(value) in known or _FOR_THE_EYE.search(kind.__name__) or isinstance(value, (logging.Logger, torch.nn.Module)):
        return False
    if isinstance(value, torch.Tensor) and value.requires_grad:
        return False
    if isinstance(value, ModuleType):
        return not installed(getattr(value, "__file__", None))
    if isinstance(value, FunctionType):
        return not installed(value.__code__.co_filename)
    return isinstance(value, (*_FILLED, tuple)) or is_own(value) or (isinstance(value, type) and _is_own_class(value))


def _is_own_class(kind: type) -> bool:
    return any(
        not installed(each.__code__.co_filename) for each in vars(kind).values() if isinstance(each, FunctionType)
    )


@functools.cache
def _changes_itself(kind: Any, method: str) -> bool:
    """Whether the method of an own class goes on with what it has set in the object before."""
    function: Any = inspect.getattr_static(kind, method, None)
    if not isinstance(function, FunctionType) or installed(function.__code__.co_filename):
        return False
    itself = next(iter(function.__code__.co_varnames), "")
    found = (each for each in carried_in(function.__code__) if each.path[0] == itself and len(each.path) > 1)
    return any(each.method is None or each.method in _CHANGES or each.method.endswith("_") for each in found)


def _is_state(value: Any, anew: bool, known: Collection[int]) -> bool:
    if isinstance(value, float) and any(0 <= clock() - value < _JUST_NOW_S for clock in _CLOCKS):
        return False
    if isinstance(value, _FILLED):
        return anew or id(value) not in known
    return (
        type(value) in PLAIN
        or isinstance(value, tuple)
        or (anew and (isinstance(value, torch.nn.Module) or is_own(value)))
    )


def sentence(names: Sequence[str]) -> str:
    return (
        f"the loop carries variables from step to step that no snapshot holds: {', '.join(names)}. After a restart they begin with their "
        "first values. If the training depends on one of them, keep it in a mapping that the Session is given: "
        f'state = {{"{names[0].rpartition(".")[2]}": …}}; Session(…, state=state)'
    )
