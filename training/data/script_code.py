"""Which parts of a data loader the script has written itself, and which variables of its modules that code names."""

from __future__ import annotations

import argparse
import builtins
import dis
import functools
import threading
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ...checkpoint.format.pytree_walk import PLAIN
from ..warm import side_effects

BAGS = (SimpleNamespace, argparse.Namespace, threading.local)
"""Classes of libraries whose objects have attributes that the script sets."""
_READS = frozenset(("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"))
_PARTS = frozenset(("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR"))
_BETWEEN = frozenset(("COPY", "DUP_TOP", "CACHE", "PUSH_NULL"))
"""Instructions between a name and its part, as in `config.level += 1`."""
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))


installed = functools.cache(side_effects.installed)
"""Cached by file: a file has many functions."""


class Named(NamedTuple):
    """A variable of a module."""

    label: str
    """As the code names it: `level`, or `config.level`."""
    around: dict[str, Any]
    """All variables of the module."""
    name: str

    @property
    def value(self) -> Any:
        """The variable's value; None: it does not exist yet."""
        return self.around.get(self.name)

    @property
    def is_builtin(self) -> bool:
        return self.name not in self.around and hasattr(builtins, self.name)


def names_of(function: FunctionType) -> list[Named]:
    """Return the variables of the script's modules that a function names, in an order that is the same after a restart."""
    return [_found(function.__globals__, path) for path in _named_in(function.__code__)]


@functools.cache
def _named_in(code: CodeType) -> list[tuple[str, ...]]:
    """Return the paths that code names. Cached: each worker looks through the same code."""
    return sorted(set(_paths(code)))


def _paths(code: CodeType) -> Iterator[tuple[str, ...]]:
    """Yield what code names of its module: `config.level` as two parts."""
    path: tuple[str, ...] = ()
    for each in dis.get_instructions(code):
        if each.opname in _BETWEEN:
            continue
        if path and each.opname in _PARTS:
            path = (*path, each.argval)
            continue
        if path:
            yield path
        path = (each.argval,) if each.opname in _READS and not each.argval.startswith("__") else ()
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _paths(inner)


def _found(around: dict[str, Any], path: tuple[str, ...]) -> Named:
    """Return the first variable on a path that is not a module of the script, or the end of the path."""
    at = 1
    while at < len(path) and _is_script_module(module := around.get(path[at - 1])):
        around, at = vars(module), at + 1
    return Named(".".join(path[:at]), around, path[at - 1])


def _is_script_module(thing: Any) -> bool:
    return isinstance(thing, ModuleType) and not installed(getattr(thing, "__file__", None))


def methods(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """Yield the methods that the script has written, also those of base classes."""
    for each in kind.__mro__:
        for name, method in vars(each).items():
            for function in _functions(method):
                if not installed(function.__code__.co_filename):
                    yield f"{each.__name__}.{name}", function


def _functions(method: Any) -> Iterator[FunctionType]:
    """Yield the functions in a method, a property, or a method whose results are cached."""
    if isinstance(method, property):
        parts: tuple[Any, ...] = (method.fget, method.fset, method.fdel)
    else:
        parts = (getattr(method, "__func__", getattr(method, "func", method)),)
    for part in parts:
        if isinstance(part, FunctionType | functools._lru_cache_wrapper):  # made by a decorator
            part = vars(part).get("__wrapped__", part)
        if isinstance(part, FunctionType):
            yield part


@functools.cache
def of_script(kind: Any) -> bool:
    """Return whether the script has written this very class, or one that it derives from."""
    return not installed(side_effects.module_file(kind)) or any(methods(kind))


def is_own(thing: Any) -> bool:
    """Return whether it is an object that has attributes of the script, and does not belong to the training."""
    kind: Any = type(thing)
    if kind in PLAIN or issubclass(kind, (type, ModuleType, FunctionType)):
        return False
    return (issubclass(kind, BAGS) or of_script(kind)) and not apart(thing)


def apart(thing: Any) -> bool:
    """Return whether it belongs to the training or to this package, or is an iterator of torch's."""
    if issubclass(type(thing), torch.nn.Module):  # its own parameters() may be another function
        return next(torch.nn.Module.parameters(thing), None) is not None
    ours = str(type(thing).__module__).startswith(f"{__package__.partition('.')[0]}.")
    return ours or issubclass(type(thing), (torch.optim.Optimizer, _BaseDataLoaderIter))


def goes_on_with(kind: type, name: str) -> bool:
    """Return whether the class's `__iter__` uses an attribute of that name without making it anew first. tqdm.auto's class keeps one for
    `async for` alone."""
    code = getattr(kind.__iter__, "__code__", None)  # type: ignore[attr-defined]
    if code is None:
        return True
    for each in dis.get_instructions(code):
        if each.opcode in _JUMPS:  # what follows depends on a condition
            break
        if each.argval == name and each.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"):
            return each.opname != "STORE_ATTR"
    return name in code.co_names
