"""Finds variables that the script's loop, and functions that it calls, carry from step to step and that no snapshot contains. The log names
them once.

The byte code shows these variables in two ways. The loop may read a variable before it sets the variable in this step, so it uses the value
of the previous step. Or the loop changes the value in place. `script_generators.py` saves random generators. `changed_objects.py` finds
objects that are changed in place elsewhere.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ...checkpoint.format.pytree_walk import PLAIN
from ...resilience.clock import monotonic_s, wall_s
from ..code_flow.carried import Carried, carried_from_outside, carried_in, enumerated_in, named_in
from ..code_flow.frame_variables import values_in, variables_of
from ..code_flow.variable_uses import SOME
from ..data.script_code import installed, is_own, of_script
from ..state.modules.attribute_rules import why_lost
from .saved_objects import Saved
from .script_objects import (
    attributes,
    draws,
    for_the_eye,
    is_a,
    is_no_state,
    items_of,
    of_a_script,
    part_at,
)

_CLOCKS = (wall_s, monotonic_s, time.perf_counter)
_JUST_NOW_S = 60.0
"""A number within this many seconds of a clock's present value is taken for the start of a time measurement, not for state."""
_FILLED = (list, dict, set, deque, torch.Tensor, np.ndarray)
_DECORATORS = 8
_CALLED = 500
"""The most functions that are examined."""
_REACHED = 5000
"""The most objects of the Session that are recognized: the loop may use such an object under another name."""


def moved_on(frame: FrameType | None, held: Iterable[Any] = ()) -> list[str]:
    """Return the variables that the script's loop, and functions that it calls, carry from step to step and that no snapshot contains.
    held: the objects that the Session saves."""
    look = _Look(Saved([*held], _REACHED))
    found: list[str | None] = []
    for each in _looping(frame):
        around = {**each.f_globals, **variables_of(each)}
        found += [look.name_of(carried, around) for carried in carried_in(each.f_code, each.f_lasti)]
        found.append(enumerated_in(each.f_code, each.f_lasti))
        for function in _called(each.f_code, each.f_lasti, around):
            around, defaults = _around(function)
            carried_on = carried_from_outside(function.__code__, defaults)
            found += [look.name_of(carried, around) for carried in carried_on if not _is_of_no_weight(carried, around)]
    return [*dict.fromkeys(filter(None, found))]


def _looping(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frame of the script's loop. If that loop is in a generator of the script, which wraps the Session's steps, yield the frame
    of the loop over this generator too."""
    while frame is not None:
        if of_a_script(frame):
            yield frame
            if not frame.f_code.co_flags & inspect.CO_GENERATOR:
                return
        frame = frame.f_back


def _is_of_no_weight(carried: Carried, around: Mapping[str, Any]) -> bool:
    """Whether a function's variable does not matter: a constant that is created once, a flag for a warning, or an object for logs or
    progress bars."""
    variable = carried.path[0]
    made_once = len(carried.path) == 1 and (around.get(variable) is None or around[variable] is False)
    return made_once or for_the_eye(variable, around.get(variable))


def _called(code: CodeType, at: int, around: Mapping[str, Any]) -> Collection[FunctionType]:
    """Return the script's functions that a loop calls by name, directly or through one another, including methods and the `forward` of
    modules."""
    found: dict[FunctionType, None] = {}
    waiting: deque[tuple[CodeType, int, Mapping[str, Any]]] = deque([(code, at, around)])
    while waiting and len(found) < _CALLED:
        code, at, around = waiting.popleft()
        for path, method in dict.fromkeys(named_in(code, at)):
            value = around.get(path[0])
            for step in path[1:]:
                value = _part(value, step)
            for owner, function in _functions(value, method):
                if function not in found and not installed(function.__code__.co_filename):
                    found[function] = None
                    itself = {} if owner is None else dict.fromkeys(function.__code__.co_varnames[:1], owner)
                    waiting.append((function.__code__, -1, {**_around(function)[0], **itself}))
    return found


def _functions(value: Any, method: str) -> Iterator[tuple[Any, FunctionType]]:
    """Yield the functions that a call of `value`, or of its method, may start with, each with the object whose method it is."""
    kind: Any = type(value)
    if issubclass(kind, functools.partial):
        yield from _functions(value.func, "")
    elif issubclass(kind, MethodType):
        yield from _functions(value.__self__, value.__func__.__name__)
    elif method and issubclass(kind, (ModuleType, type)):
        yield from _functions(part_at(value, (".", method)), "")
    elif method:
        if (held := attributes(value).get(method)) is not None:
            said = issubclass(kind, (torch.nn.Module, torch.optim.Optimizer)) and why_lost(held)
            yield from () if said else _functions(held, "")
            return
        if function := _unwrapped(inspect.getattr_static(kind, method, None)):
            yield value, function
    elif issubclass(kind, FunctionType):
        if function := _unwrapped(value):
            yield None, function
    elif issubclass(kind, torch.nn.Module):
        for each in {type(each): each for each in torch.nn.Module.modules(value)}.values():
            yield from _functions(each, "forward")
    elif is_own(value):
        yield from _functions(value, "__call__")


def _unwrapped(function: Any) -> FunctionType | None:
    """Return the function inside decorators such as `torch.no_grad()`; None if it is not a Python function."""
    for _ in range(_DECORATORS):
        if is_a(function, (staticmethod, classmethod)):
            function = function.__func__
        function = attributes(function).get("__wrapped__", function)
    return function if issubclass(type(function), FunctionType) else None


def _around(function: FunctionType) -> tuple[dict[str, Any], Collection[str]]:
    """Return the variables that persist from call to call: those of the function's module and of the functions around it, and defaults of
    its parameters. Also return the defaults' names."""
    code, given = function.__code__, function.__defaults__ or ()
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    variables = {**function.__globals__, **{name: part_at(cell, (".", "cell_contents")) for name, cell in cells}}
    names = code.co_varnames[code.co_argcount - len(given) : code.co_argcount]
    defaults = {**dict(zip(names, given, strict=True)), **(function.__kwdefaults__ or {})}
    defaults = {
        name: value for name, value in defaults.items() if is_a(value, (*_FILLED, itertools.count)) or is_own(value)
    }
    return {**variables, **defaults}, defaults.keys()


@dataclass
class _Look:
    saved: Saved
    met: set[tuple[int, str]] = field(default_factory=set)
    """Methods that are being examined."""

    @property
    def known(self) -> Collection[int]:
        """Ids of the objects that the Session saves."""
        return self.saved.things.keys()

    def name_of(self, carried: Carried, around: Mapping[str, Any]) -> str:
        """Return the variable's name for the log. Return an empty text if it is no state, or the Session saves it."""
        (name, *steps), method, anew = carried
        value, label, whole = around.get(name), name, False
        if method is None and not steps:
            unmade = value is None and for_the_eye(name)  # for example, a log writer that the loop creates later
            return name if name in around and not unmade and _is_state(value, anew, self.known) else ""
        for step in steps[:-1]:
            if not _holds_parts(value, self.known):
                return ""
            value = _part(value, step)
            whole = whole or step[0] == "["
            label += "" if whole else f".{step[1]}"
        if not _holds_parts(value, self.known):
            return ""
        if method is not None:
            filled = carried.fills and (is_a(value, _FILLED) or _counts(value))
            return label if filled or self._changes_itself(value, method) else ""
        kind, key = steps[-1]
        if kind == "[":
            return label if is_a(value, _FILLED) else ""
        part = _part(value, steps[-1])
        if is_a(value, _FILLED) or self.saved.has(value, part) or not _is_state(part, anew, self.known):
            return ""
        return f"{label}.{key}"

    def _changes_itself(self, value: Any, method: str) -> bool:
        """Whether the method of a script's object continues from values that it has set in that object before."""
        function = _unwrapped(inspect.getattr_static(type(value), method, None))
        if (id(value), method) in self.met or function is None or not is_own(value):
            return False
        self.met.add((id(value), method))
        code = function.__code__
        itself = dict.fromkeys(code.co_varnames[:1], value)
        own = (each for each in carried_in(code) if each.path[0] in itself and len(each.path) > 1)
        changes = not installed(code.co_filename) and any(self.name_of(each, itself) for each in own)
        self.met.discard((id(value), method))
        return changes


def _part(value: Any, step: tuple[str, Any]) -> Any:
    if step == SOME:
        return next((part for _, part in items_of(value)), None)
    return part_at(value, step)


def _holds_parts(value: Any, known: Collection[int]) -> bool:
    """Whether parts of the value may be state of the script that the Session does not save."""
    if is_no_state(value, known) or is_a(value, torch.nn.Module):
        return False
    if is_a(value, torch.Tensor) and value.requires_grad:
        return False
    if is_a(value, ModuleType):
        return not installed(getattr(value, "__file__", None))
    if is_a(value, FunctionType):
        return not installed(value.__code__.co_filename)
    return is_a(value, (*_FILLED, tuple)) or _counts(value) or is_own(value) or (is_a(value, type) and of_script(value))


def _counts(value: Any) -> bool:
    """Whether the value is a counter, or a generator function of the script that yields no batches. (`data/notices.py` reports those that
    yield batches.)"""
    if not is_a(value, GeneratorType):
        return is_a(value, itertools.count)
    held = values_in(value) if value.gi_frame is not None else ()
    return not installed(value.gi_code.co_filename) and not any(
        is_a(each, (DataLoader, _BaseDataLoaderIter)) for each in held
    )


def _is_state(value: Any, anew: bool, known: Collection[int]) -> bool:
    if type(value) in (int, float) and any(
        0 <= clock() - seconds < _JUST_NOW_S for clock in _CLOCKS for seconds in (value, value / 1e9)
    ):
        return False
    if draws(value):  # `script_generators.py` saves it by its name
        return False
    if is_a(value, _FILLED):
        return anew or id(value) not in known
    return type(value) in PLAIN or is_a(value, tuple) or (anew and (is_a(value, torch.nn.Module) or is_own(value)))


def sentence(names: Sequence[str]) -> str:
    return (
        f"the training carries variables from step to step that no snapshot contains: {', '.join(names)}. After a restart they begin "
        "with their first values. A rewind in place leaves them as they are. If the training depends on a count of steps, use the step "
        "that the Session yields. If it depends on another variable, keep it in a mapping that the Session is given: "
        f'state = {{"{names[0].rpartition(".")[2]}": …}}; Session(…, state=state)'
    )
