"""What a data loader has for itself and moves on with: its generators of random numbers, its counters, and what it shuffles, fills or makes
when it is needed.

It is looked for in the loader and in all that it consists of: datasets, samplers, transforms, and what functions among these refer to.
"""

from __future__ import annotations

import dis
import enum
import functools
from collections import deque
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ...checkpoint.format.pytree_walk import PLAIN
from ..state.values.value_source import Known
from ..warm.side_effects import installed, module_file
from .held_values import GENERATORS
from .value_holders import Given, Holder, OfClass, Variables, slots_of

_HOLDERS = 1024
"""So many objects are looked through, in loaders and datasets that may hold everything."""
_FEW = 64
"""Of a longer list only what gives samples, is called or draws is looked through. The rest of it is data."""


class Own:
    """What `holders` and what they consist of move on with, by names that are the same in each life."""

    def __init__(self, **holders: Any) -> None:
        self._known = Known()
        self._holders: list[Holder] = []
        self._seen: dict[int, Any] = {}
        todo = deque(holders.items())
        if holders:
            self._holders.append(Given("", holders, self._known, whole=True, told=True))
        while todo and len(self._holders) < _HOLDERS:
            name, thing = todo.popleft()
            if id(thing) in self._seen or type(thing) in PLAIN or isinstance(thing, (ModuleType, *GENERATORS)):
                continue
            self._seen[id(thing)] = thing
            todo += ((f"{name}.{at}", part) for at, part in self._look(name, thing))
        self._seen.clear()
        for holder in self._holders:
            holder.begin()

    def values(self) -> list[Any]:
        return [value for holder in self._holders[1:] for value in holder.values()]

    def collect(self) -> dict[str, Any]:
        return {holder.name: kept for holder in self._holders if (kept := holder.collect())}

    def restore(self, kept: Mapping[str, Any]) -> None:
        for holder in self._holders:
            holder.restore(kept.get(holder.name, {}))

    def lost(self) -> list[str]:
        """What has changed since the last call and cannot be put back, by name."""
        found = [name for holder in self._holders for name in holder.lost]
        for holder in self._holders:
            holder.lost.clear()
        return found

    def _look(self, name: str, thing: Any) -> Iterator[tuple[Any, Any]]:
        """What it consists of; it becomes a holder where it has places."""
        match thing:
            case list() | tuple() | deque():
                yield from ((at, part) for at, part in enumerate(thing) if len(thing) <= _FEW or _acts(part))
            case dict():
                yield from ((at, part) for at, part in thing.items() if len(thing) <= _FEW or _acts(part))
            case functools.partial():
                parts = {
                    "func": thing.func,
                    **{f"args.{at}": each for at, each in enumerate(thing.args)},
                    **thing.keywords,
                }
                self._holders.append(Given(name, parts, self._known, whole=True, told=True))
                yield from parts.items()
            case MethodType():
                yield "self", thing.__self__
            case FunctionType():
                yield from self._function(name, thing)
            case type() | torch.Tensor() | np.ndarray() | enum.Enum() | SimpleNamespace():
                return
            case _ if not _apart(thing):
                yield from self._object(name, thing)

    def _object(self, name: str, thing: Any) -> Iterator[tuple[Any, Any]]:
        kind: Any = type(thing)
        if not hasattr(thing, "__dict__") and not slots_of(kind):
            return
        self._known.add(name, thing)
        own = _of_script(kind)
        holder = Holder(name, thing, self._known, whole=own or _acts(thing), told=own)
        self._holders.append(holder)
        yield from sorted(holder.live().items())
        if id(kind) in self._seen:
            return
        self._seen[id(kind)] = kind
        yield from _methods(kind)
        self._holders += (
            OfClass(f"{name}.{each.__name__}", each, self._known, whole=True, told=True)
            for each in kind.__mro__
            if _of_script(each)
        )

    def _function(self, name: str, thing: FunctionType) -> Iterator[tuple[Any, Any]]:
        own = not installed(thing.__code__.co_filename)
        names = sorted(set(_names(thing.__code__))) if own else []
        holder = Variables(name, thing, self._known, names, told=own)
        self._holders.append(holder)
        yield from holder.live().items()
        for each in names:
            part = thing.__globals__.get(each)
            if isinstance(part, FunctionType) or _gives(part):
                yield each, part


def _apart(thing: Any) -> bool:
    """Whether it is the training's, or one of torch's iterators."""
    if isinstance(thing, torch.nn.Module):
        return next(thing.parameters(), None) is not None
    ours = str(type(thing).__module__).startswith(f"{__package__}.")
    return ours or isinstance(thing, (torch.optim.Optimizer, _BaseDataLoaderIter))


def _gives(thing: Any) -> bool:
    """Whether it gives samples, or says which."""
    return not isinstance(thing, (type, ModuleType)) and any(
        hasattr(type(thing), name) for name in ("__iter__", "__getitem__")
    )


def _acts(thing: Any) -> bool:
    """Whether it gives samples or makes them, or draws."""
    return type(thing) not in PLAIN and (_gives(thing) or callable(thing) or isinstance(thing, GENERATORS))


def _methods(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """Those that the script has written, also of classes that it derives from."""
    for each in kind.__mro__:
        for name, method in vars(each).items():
            function = getattr(method, "__func__", method)
            if isinstance(function, FunctionType) and not installed(function.__code__.co_filename):
                yield f"{each.__name__}.{name}", function


@functools.cache
def _of_script(kind: Any) -> bool:
    """Whether the script has written this very class, or one that it derives from."""
    return not installed(module_file(kind)) or any(_methods(kind))


def _names(code: CodeType) -> Iterator[str]:
    """Variables of its module that code names."""
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME") and not each.argval.startswith("__"):
            yield each.argval
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
