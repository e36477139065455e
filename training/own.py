"""What a data loader has for itself and moves on with: its generators of random numbers, and the numbers that it counts in.

They are looked for in the loader and in all that it consists of: datasets, samplers, transforms, and what functions among these refer to.
"""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch

from .kinds import packed, unpacked
from .traces import installed


@dataclass(frozen=True)
class Count:
    """A whole number that an object which gives samples has as an attribute: its epoch, how often it was gone through."""

    holder: Any
    name: str
    first: int
    """What it was when the loop began. A number that is still the same is not kept: it may be a setting, and another one in the next
    life."""

    def get(self) -> int:
        return int(getattr(self.holder, self.name, self.first))

    def put(self, value: int) -> None:
        if self.get() != value:
            setattr(self.holder, self.name, value)


Own: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random | Count
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
        found |= {f"{name}.{each.name}": each for each in _counts(thing)}
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


def _counts(thing: Any) -> Iterator[Count]:
    if _gives(thing) and hasattr(thing, "__dict__"):
        for name, value in vars(thing).items():
            if type(value) is int:
                yield Count(thing, name, value)


def _has_parts(thing: Any) -> bool:
    return isinstance(thing, (list, tuple, dict, *_GENERATORS)) or hasattr(thing, "__dict__")


def collect_own(own: Mapping[str, Own]) -> dict[str, Any]:
    return {
        name: _state(each) for name, each in own.items() if not (isinstance(each, Count) and each.get() == each.first)
    }


def _state(own: Own) -> Any:
    match own:
        case torch.Generator() | np.random.RandomState():
            return own.get_state()
        case np.random.Generator():
            return own.bit_generator.state
        case random.Random():
            return packed(own.getstate())
        case Count():
            return own.get()


def restore_own(own: Mapping[str, Own], kept: Mapping[str, Any]) -> None:
    for name, each in own.items():
        if isinstance(each, Count):
            each.put(kept.get(name, each.first))
        elif name in kept:
            match each:
                case torch.Generator() | np.random.RandomState():
                    each.set_state(kept[name])
                case np.random.Generator():
                    each.bit_generator.state = kept[name]
                case random.Random():
                    each.setstate(unpacked(kept[name]))
