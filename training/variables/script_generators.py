"""Saves random generators that the script keeps in its own variables, under the variables' names.

When the loop begins, this module searches the variables of the script's running functions and modules, and the objects in them. At each
snapshot, it looks up the names again: since then, a name may have got a first generator, or another one.
"""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ...checkpoint.format.pytree_walk import PLAIN
from ..code_flow.frame_variables import variables_of
from ..data.held_values import GENERATORS
from ..data.script_code import is_own
from ..state.tensors.in_place import Nested
from ..state.values.type_adapters import packed, unpacked
from ..state.values.value_source import Known, Values
from .script_objects import (
    Step,
    attributes,
    attributes_of,
    draws,
    is_a,
    is_script_file,
    items_of,
    of_a_script,
    part_at,
)

_MOST = 64
"""The most generators that are saved. Each generator takes some kB in each snapshot."""
_ASKED = 16
"""The most objects in which each snapshot searches for new generators."""
_LONGEST = 256
"""The most parts of a list or mapping. A longer one is not searched."""
_DEEPEST = 7
"""The most steps (attributes or keys) from a variable to a generator. A default argument of a function in a decorator's closure is seven
steps away."""
_LOOKED_AT = 2000
_NEWLY = 200
"""The most objects that are searched: at the start (`_LOOKED_AT`), and when a snapshot finds new variables (`_NEWLY`)."""
_OF_THE_DATA = (Dataset, Sampler, DataLoader)
"""Classes of objects whose deep contents are rewound with the data."""
_NOTHING = frozenset((*PLAIN, torch.Tensor, torch.nn.Parameter, np.ndarray, ModuleType))


class _Place(NamedTuple):
    scope: int
    steps: tuple[Step, ...]
    """The steps that lead to the place; the first step is a variable. Without steps, the place stands for all variables of the scope."""

    def part(self, step: Step) -> _Place:
        return _Place(self.scope, (*self.steps, step))


@dataclass
class _Scope:
    label: str
    code: CodeType | None
    """The code of a function; None for a module."""
    held: dict[str, Any] | None
    """The variables of a module; None for a function."""


@dataclass
class _Holder:
    """A scope, or an object of the script, that may get a generator later."""

    place: _Place
    names: set[str] = field(default_factory=set)
    empty: list[str] = field(default_factory=list)
    """The names in `names` whose values are None."""

    def noted(self, held: Mapping[str, Any]) -> _Holder:
        self.names, self.empty = {*held}, [name for name, value in [*held.items()] if value is None]
        return self


class Generators:
    """The random generators in the script's variables, as a source (an object that snapshots save) of this rank alone."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}
        self._source = Values("the script's generators", self._found, Known())
        self._kept: Nested | None = None
        self._scopes: list[_Scope] = []
        self._holders: dict[str, _Holder] = {}
        self._places: dict[str, _Place] = {}
        self._last: dict[str, Any] = {}

    def look(self, frame: FrameType | None) -> None:
        """Search the script's variables when the loop begins. frame: the code that requests the loop's first step."""
        self._scopes = [*_scopes(frame)]
        self._holders = {scope.label: _Holder(_Place(at, ())) for at, scope in enumerate(self._scopes)}
        self._now(frame, _LOOKED_AT)

    def collect(self) -> Nested:
        if self._kept is not None:  # a snapshot between `restore` and `put_back`
            return self._kept
        self._fill(self._now(sys._getframe()))
        return self._source.collect()

    def restore(self, kept: Nested) -> None:
        """Record the state to restore. `put_back` must follow."""
        self._kept = kept

    def put_back(self) -> None:
        """Restore the generators. Call this after the data was rewound, because a loader may draw from the generators during that."""
        if self._kept is None:
            return
        live = self._now(sys._getframe())
        self._fill(live)
        self._source.restore(self._kept)
        self._kept = None
        for name, kept in self._found.items():
            there = live.get(name)
            if there is None:
                self._put(name, kept)
            elif type(there) not in GENERATORS and isinstance(kept, tuple):
                there.setstate(unpacked(kept))

    def _fill(self, live: Mapping[str, Any]) -> None:
        self._found.clear()
        for name, each in live.items():
            self._found[name] = each if type(each) in GENERATORS else packed(each.getstate())

    def _put(self, name: str, made: Any) -> None:
        """If the script has not created a generator yet, assign the restored generator to its place, which is a variable of a module or an
        attribute. Do nothing if the place already has a value."""
        label, _, last = name.rpartition(".")
        holder = self._holders.get(label)
        if holder is None or type(made) not in GENERATORS:
            return
        held = self._scopes[holder.place.scope].held
        if holder.place.steps:
            held = getattr(self._resolved(holder.place, self._variables(sys._getframe())), "__dict__", None)
        if type(held) is dict and last.isidentifier() and held.get(last) is None:
            held[last] = made

    def _now(self, frame: FrameType | None, most: int = _NEWLY) -> dict[str, Any]:
        """Return the generators that the names have now, by name, each generator only once."""
        variables = self._variables(frame)
        self._look_again(variables, most)
        found: dict[int, tuple[str, Any]] = {}
        for name, place in self._places.items():
            live = self._resolved(place, variables) if place.scope in variables else self._last.get(name)
            if draws(live):
                found.setdefault(id(live), (name, live))
        self._last = dict(found.values())
        return dict(self._last)

    def _variables(self, frame: FrameType | None) -> dict[int, dict[str, Any]]:
        """Return the variables by scope. A function's variables are included only while the frame is within the function."""
        found = {at: scope.held for at, scope in enumerate(self._scopes) if scope.held is not None}
        waiting = {id(scope.code): at for at, scope in enumerate(self._scopes) if scope.code is not None}
        while frame is not None and waiting:
            if (at := waiting.pop(id(frame.f_code), None)) is not None:
                found[at] = variables_of(frame)
            frame = frame.f_back
        return found

    def _resolved(self, place: _Place, variables: Mapping[int, Mapping[str, Any]]) -> Any:
        value: Any = variables.get(place.scope)
        for step in place.steps:
            value = part_at(value, step)
        return value

    def _look_again(self, variables: Mapping[int, Mapping[str, Any]], most: int) -> None:
        """Search the values that the holders have got since the last search."""
        queue: deque[tuple[str, _Place, Any]] = deque()
        for label, holder in self._holders.items():
            held = self._resolved(holder.place, variables)
            queue.extend(self._new(label, holder, attributes(held) if holder.place.steps else held))
        seen: set[int] = set()
        while queue:
            label, place, value = queue.popleft()
            if draws(value):
                if len(self._places) < _MOST:
                    self._places.setdefault(label, place)
                continue
            if type(value) in _NOTHING or id(value) in seen or len(place.steps) >= _DEEPEST:
                continue
            seen.add(id(value))
            shallow = issubclass(type(value), _OF_THE_DATA)
            parts: list[tuple[Step, Any]] = []
            with suppress(Exception):  # metaclasses of the script's classes, and keys of its mappings, may run code
                if len(self._holders) < len(self._scopes) + _ASKED and is_own(value):
                    self._holders.setdefault(label, _Holder(place).noted(attributes(value)))
                parts = [*_parts(value)] if most > 0 else []
            for (kind, key), part in parts:
                if not shallow or draws(part):
                    most -= 1
                    where = f"{label}.{key}" if kind == "." else f"{label}[{key!r:.40}]"
                    queue.append((where, place.part((kind, key)), part))

    def _new(self, label: str, holder: _Holder, held: Mapping[str, Any] | None) -> Iterator[tuple[str, _Place, Any]]:
        filled = [name for name in holder.empty if held and held.get(name) is not None]
        if held is None or (len(held) == len(holder.names) and not filled):
            return
        for name in [*(name for name in [*held] if name not in holder.names), *filled]:
            yield f"{label}.{name}", holder.place.part(("." if holder.place.steps else "[", name)), held[name]
        holder.noted(held)


def _scopes(frame: FrameType | None) -> Iterator[_Scope]:
    """Yield the script's running functions, the innermost first, then its modules."""
    met = set()
    while frame is not None:
        code = frame.f_code
        if of_a_script(frame) and code.co_flags & inspect.CO_OPTIMIZED and code not in met:
            met.add(code)
            yield _Scope(getattr(code, "co_qualname", code.co_name), code, None)
        frame = frame.f_back
    for name, module in list(sys.modules.items()):
        if is_script_file(attributes(module).get("__file__")):
            yield _Scope(name, None, attributes(module))


def _parts(value: Any) -> Iterable[tuple[Step, Any]]:
    if not issubclass(type(value), (list, tuple, deque, dict)):
        return (((".", name), part) for name, part in attributes_of(value).items() if type(part) not in _NOTHING)
    if len(value) > _LONGEST or PLAIN.issuperset(type(part) for _, part in items_of(value)):
        return ()
    return ((("[", key), part) for key, part in items_of(value) if _names_a_part(key) and type(part) not in _NOTHING)


def _names_a_part(key: Any) -> bool:
    return is_a(key, Enum) or type(key) in PLAIN or (type(key) is tuple and all(map(_names_a_part, key)))
