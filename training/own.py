"""What a data loader has for itself and moves on with: its generators of random numbers, the numbers that it counts in, and the small
lists, mappings, sets and arrays that it shuffles or fills.

They are looked for in the loader and in all that it consists of: datasets, samplers, transforms, and what functions among these refer to.
"""

from __future__ import annotations

import copy
import functools
import random
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch

from ..checkpoint.walk import PLAIN
from .kinds import packed, unpacked
from .packing import MAPPINGS
from .traces import installed
from .values import Known, Packed

_CHANGES = (int, float, list, set, deque, np.ndarray, *MAPPINGS)
_SMALL = 1 << 15
"""Values in a list, or words in an array, with all that it holds: it is looked at with each batch."""


@dataclass(frozen=True)
class Attribute:
    """A small value that an object which gives samples has as an attribute: its epoch, the batches that it shuffles, what it has
    loaded last."""

    holder: Any
    name: str
    first: Any
    """What it was when the loop began. A value that is still the same is not kept: it may be a setting, and another one in the next
    life."""

    @property
    def live(self) -> Any:
        return getattr(self.holder, self.name, None)

    @property
    def moved(self) -> bool:
        """Whether it is another value now, and one that can be kept: a cache may have grown."""
        return not _equal(self.live, self.first) and _small(self.live)

    def get(self) -> Any:
        return copy.deepcopy(Packed(self.name, Known()).pack(self.live))

    def put(self, kept: Any) -> None:
        """Into the live list or mapping, which others may hold. None: what it was at first."""
        if not _small(self.live) or (kept is None and not self.moved):
            return
        packing = Packed(self.name, Known())
        kept = packing.pack(self.first) if kept is None else kept
        found = packing.unpack(copy.deepcopy(kept), self.live)
        if not _equal(found, self.live):  # a list has been filled
            setattr(self.holder, self.name, found)


Own: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random | Attribute
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_PARTS = 256
"""So many objects are looked through, in loaders and datasets that may hold everything."""


def own_of(**holders: Any) -> dict[str, Own]:
    """What `holders` and what they consist of move on with, each once, by names that are the same in each life."""
    found: dict[str, Own] = {}
    seen: set[int] = set()
    todo = deque(holders.items())
    while todo and len(seen) < _PARTS:
        name, thing = todo.popleft()
        if id(thing) in seen or isinstance(thing, (type, ModuleType, torch.Tensor, torch.nn.Module)):
            continue
        seen.add(id(thing))
        if isinstance(thing, _GENERATORS):
            found[name] = thing
            continue
        todo += ((f"{name}.{at}", part) for at, part in _parts(thing) if _has_parts(part))
        found |= {f"{name}.{each.name}": each for each in _attributes(thing)}
    return found


def _parts(thing: Any) -> Iterator[tuple[Any, Any]]:
    match thing:
        case list() | tuple():
            yield from enumerate(thing) if len(thing) <= _PARTS else ()
        case dict():
            yield from thing.items() if len(thing) <= _PARTS else ()
        case functools.partial():
            yield from (("func", thing.func), ("args", thing.args), ("keywords", thing.keywords))
        case MethodType():
            yield "self", thing.__self__
        case FunctionType():
            yield from _referred_to(thing)
        case _:
            yield from sorted(vars(thing).items()) if hasattr(thing, "__dict__") else ()
            yield from _methods(type(thing))


def _methods(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """Those that the script has written, also of classes that it derives from."""
    for each in kind.__mro__:
        for name, method in vars(each).items():
            function = getattr(method, "__func__", method)
            if isinstance(function, FunctionType) and not installed(function.__code__.co_filename):
                yield f"{each.__name__}.{name}", function


def _referred_to(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function takes from around it: variables, defaults, and, where it is of the script's own, what is global in its module."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield "defaults", function.__defaults__ or ()
    if installed(function.__code__.co_filename):
        return
    for name in sorted(set(_names(function.__code__))):
        part = function.__globals__.get(name)
        if isinstance(part, (*_GENERATORS, FunctionType)) or _gives(part):
            yield name, part


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _gives(thing: Any) -> bool:
    """Whether it gives samples, or says which."""
    return not isinstance(thing, (type, ModuleType)) and any(
        hasattr(type(thing), name) for name in ("__iter__", "__getitem__")
    )


def _attributes(thing: Any) -> Iterator[Attribute]:
    if hasattr(thing, "__dict__") and (_gives(thing) or any(_methods(type(thing)))):
        for name, value in vars(thing).items():
            if _small(value):
                yield Attribute(thing, name, copy.deepcopy(value))


def _small(value: Any) -> bool:
    return type(value) in _CHANGES and _left(value, _SMALL) >= 0


def _left(value: Any, room: int) -> int:
    """Of `room`, after all values in this one; less than 0: it is too large, or holds others than plain ones."""
    kind = type(value)
    parts: Collection[Any] = ()
    if kind is np.ndarray:
        return room - value.nbytes // 8 if value.dtype.kind in "biufc" else -1
    if kind in MAPPINGS:
        parts = (*value.keys(), *value.values()) if len(value) <= room else range(room + 1)
    elif kind in (list, tuple, set, deque):
        parts = value
    elif kind not in PLAIN:
        return -1
    room -= max(1, len(parts))
    if room < 0 or PLAIN.issuperset(map(type, parts)):
        return room
    for part in parts:
        if (room := _left(part, room)) < 0:
            break
    return room


def _equal(one: Any, other: Any) -> bool:
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is np.ndarray:
        return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()
    if kind in MAPPINGS:  # their order counts
        return _equal([*one.items()], [*other.items()])
    try:
        return bool(one == other)
    except ValueError:  # arrays within
        return len(one) == len(other) and all(map(_equal, one, other))


def _has_parts(thing: Any) -> bool:
    return isinstance(thing, (list, tuple, dict, *_GENERATORS)) or hasattr(thing, "__dict__")


def collect_own(own: Mapping[str, Own]) -> dict[str, Any]:
    return {name: _state(each) for name, each in own.items() if not isinstance(each, Attribute) or each.moved}


def _state(own: Own) -> Any:
    match own:
        case torch.Generator() | np.random.RandomState():
            return own.get_state()
        case np.random.Generator():
            return own.bit_generator.state
        case random.Random():
            return packed(own.getstate())
        case Attribute():
            return own.get()


def restore_own(own: Mapping[str, Own], kept: Mapping[str, Any]) -> None:
    for name, each in own.items():
        if isinstance(each, Attribute):
            each.put(kept.get(name))
        elif name in kept:
            match each:
                case torch.Generator() | np.random.RandomState():
                    each.set_state(kept[name])
                case np.random.Generator():
                    each.bit_generator.state = kept[name]
                case random.Random():
                    each.setstate(unpacked(kept[name]))
