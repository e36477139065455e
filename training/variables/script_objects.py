"""Reads the contents of the script's variables and objects without calling the script's code. So this module uses no property,
`__getitem__` or `__iter__` of the script's classes, and no `isinstance`, which asks a proxy for its `__class__`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import os
import random
import re
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CellType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch

from ...checkpoint.format.pytree_walk import PLAIN
from ..code_flow.carried import set_anew_in
from ..code_flow.frame_variables import variables_of
from ..data.held_values import GENERATORS, OF_THE_RANK
from ..data.script_code import BAGS, installed, is_own
from ..state.values.kind import slots_of

_PYTHONS = (os.path.dirname(os.__file__), str(Path(__file__).parents[2]))
"""Folders of most installed modules. Testing each module with `installed` takes 20 ms."""
_OF_FUNCTIONS = ("__defaults__", "__kwdefaults__", "__closure__")
_HOLDING: dict[Any, tuple[str, ...]] = {
    functools.partial: ("func", "args", "keywords"),
    (MethodType, BuiltinFunctionType): ("__self__",),
    (staticmethod, classmethod): ("__func__",),
    CellType: ("cell_contents",),
}
_CONTAINERS: tuple[Any, ...] = (list, tuple, deque, set, frozenset)
_WORDS = re.compile("[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_FOR_THE_EYE = frozenset(
    (
        *("log", "logs", "logger", "logging", "writer", "timer", "profiler", "stopwatch"),
        *("progress", "printer", "print", "bar", "pbar", "tqdm", "warned", "wandb"),
    )
)
_TRAINED = (torch.Tensor, np.ndarray, torch.nn.Module)
_FEW = 16
"""The most parts at either end of a list or mapping that are looked at for tensors."""
Step = tuple[str, Any]
"""A step from an object to its part: `.` and an attribute, or `[` and a key."""


def is_a(value: Any, kinds: Any) -> bool:
    return issubclass(type(value), kinds)


def for_the_eye(name: str, value: Any = None) -> bool:
    """Whether the name of a class or variable shows that it is for logs, timers or progress bars. Modules and tensors are not, nor lists
    or mappings of them: `log_alpha` may be a trained temperature, and `weights_bar` an average. But a log may contain numbers as tensors.
    """
    words = {each.lower() for each in _WORDS.findall(name)}
    if words.isdisjoint(_FOR_THE_EYE) and not name.lower().endswith(("logger", "writer", "timer", "profiler")):
        return False
    return not is_a(value, _TRAINED) and not any(_is_trained(part) for part in ends_of(value, _FEW)[1])


def _is_trained(part: Any) -> bool:
    """Whether the part is a module, or a tensor of more than one number."""
    exact = type(part) in (torch.Tensor, torch.nn.Parameter, np.ndarray)
    return is_a(part, torch.nn.Module) or (exact and part.ndim > 0)


def draws(value: Any) -> bool:
    """Whether the value is a random generator that a snapshot can contain, and not one of the rank's global generators."""
    kind: Any = type(value)
    if kind not in GENERATORS and (not issubclass(kind, random.Random) or issubclass(kind, random.SystemRandom)):
        return False
    if any(value is each for each in OF_THE_RANK):
        return False
    return kind is not np.random.Generator or type(value.bit_generator).__module__.startswith("numpy.")


def is_no_state(value: Any, saved: Collection[int]) -> bool:
    """Whether an object is certainly not unsaved state: the Session or `script_generators.py` saves it, or it is for logs, timers or
    progress bars. saved: ids of the objects that the Session saves."""
    return id(value) in saved or draws(value) or for_the_eye(type(value).__name__, value) or is_a(value, logging.Logger)


def scopes_of(frame: FrameType | None) -> Iterator[tuple[dict[str, Any], set[Any]]]:
    """Yield the variables of the script's running functions, the innermost first, then those of its modules. Each function's variables come
    with the names that its running loop binds to other objects."""
    every: set[Any] = set()
    while frame is not None:
        if of_a_script(frame):
            paths = set_anew_in(frame.f_code, frame.f_lasti)
            rebound = {path[0] for path in paths or (() if every else set_anew_in(frame.f_code)) if len(path) == 1}
            every |= rebound
            if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                yield variables_of(frame), rebound
        frame = frame.f_back
    for module in list(sys.modules.values()):
        if is_script_file(attributes(module).get("__file__")):
            yield attributes(module), every


def reached(
    held: Iterable[Any], most: int, longest: int = sys.maxsize, but: Collection[int] = frozenset()
) -> dict[int, Any]:
    """Return the objects inside `held`, and those in `held`, by id. Objects that are fewer references away come first. most: the most
    objects to return. longest: the most parts of a container that is searched. but: ids of objects that are left out, and not searched."""
    found: dict[int, Any] = {}
    waiting = deque(held)
    while waiting and len(found) < most:
        each = waiting.popleft()
        kind: Any = type(each)
        if id(each) in found or id(each) in but or kind in PLAIN or issubclass(kind, (type, ModuleType, FunctionType)):
            continue
        found[id(each)] = each
        if not issubclass(kind, (torch.Tensor, np.ndarray)):
            waiting.extend(part for part in attributes(each).values() if type(part) not in PLAIN)
            parts = itertools.islice(items_of(each), most) if ends_of(each, 0)[0] <= longest else ()
            waiting.extend(part for _, part in parts if type(part) not in PLAIN)
    return found


def of_a_script(frame: FrameType) -> bool:
    return not installed(frame.f_globals.get("__file__"))


def is_script_file(file: Any) -> bool:
    return type(file) is str and not file.startswith(_PYTHONS) and "-packages" not in file and not installed(file)


def attributes(value: Any) -> dict[str, Any]:
    """Return an object's `__dict__` without calling its code."""
    try:
        return object.__getattribute__(value, "__dict__")  # type: ignore[no-any-return]
    except AttributeError:
        return {}


def part_at(value: Any, step: Step) -> Any:
    """Return the part of `value` at this step. Return None if there is none, or if only the script's code could return it."""
    kind, key = step
    try:
        if kind == "[":
            return _at(value, key)
        if key in (held := attributes(value)):
            return held[key]
        found = inspect.getattr_static(value if issubclass(type(value), type) else type(value), key, None)
        if issubclass(type(found), (MemberDescriptorType, GetSetDescriptorType)):
            return found.__get__(value)
        if issubclass(type(found), (staticmethod, classmethod)):
            found = found.__func__
        return None if issubclass(type(found), property) else found
    except (LookupError, AttributeError, TypeError, ValueError):
        return None


def _at(value: Any, key: Any) -> Any:
    if issubclass(type(value), dict):
        return dict.get(value, key)
    return next((base.__getitem__(value, key) for base in (list, tuple, deque) if issubclass(type(value), base)), None)


def items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return keys and parts of a list, tuple, deque, set or mapping, without calling its code. Other objects have none."""
    kind: Any = type(value)
    if issubclass(kind, dict):
        return dict.items(value)
    return enumerate(next((base.__iter__(value) for base in _CONTAINERS if issubclass(kind, base)), iter(())))


def ends_of(value: Any, most: int) -> tuple[int, list[Any]]:
    """Return the length of a container and its first and last parts, at most `most` of each. A long container is not copied."""
    kind: Any = type(value)
    base: Any = next((each for each in (dict, *_CONTAINERS) if issubclass(kind, each)), None)
    if base is None:
        return 0, []
    length, first = base.__len__(value), [part for _, part in itertools.islice(items_of(value), most)]
    behind = max(0, min(most, length - most))
    if base in (set, frozenset):
        return length, first
    if base is dict:
        return length, [*first, *[*itertools.islice(reversed(dict.values(value)), behind)][::-1]]
    return length, [*first, *(base.__getitem__(value, at) for at in range(length - behind, length))]


def attributes_of(value: Any) -> dict[str, Any]:
    """Return attributes of the script's objects, classes and functions, without calling their code. The script may keep values there."""
    kind: Any = type(value)  # isinstance would call the script's code for a proxy
    if issubclass(kind, (FunctionType, functools._lru_cache_wrapper)):
        own = issubclass(kind, FunctionType) and not installed(value.__code__.co_filename)
        named = _OF_FUNCTIONS if own else ()
        held = vars(value) if own else {name: each for name, each in vars(value).items() if name == "__wrapped__"}
        return {**{name: getattr(value, name) for name in named if getattr(value, name)}, **held}
    for kinds, names in _HOLDING.items():
        if issubclass(kind, kinds):
            return {name: part_at(value, (".", name)) for name in names}
    if issubclass(kind, type):
        own = is_script_file(getattr(sys.modules.get(value.__module__), "__file__", None))
        return {**vars(value)} if own else {}
    if issubclass(kind, ModuleType) or not is_own(value):
        return {}
    slots = {name: part_at(value, (".", name)) for name in slots_of(kind)}
    return {**attributes(value), **slots, **({} if issubclass(kind, BAGS) else {"__class__": kind})}
