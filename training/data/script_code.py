"""Tells which parts of a data loader the script itself has written, and to which variables of its modules the code refers."""

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
"""Library classes whose objects get their attributes from the script."""
_READS = frozenset(("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"))
_PARTS = frozenset(("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR"))
_BETWEEN = frozenset(("COPY", "DUP_TOP", "CACHE", "PUSH_NULL"))
"""Instructions that may stand between a name and its attribute, as in `config.level += 1`."""
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))


installed = functools.cache(side_effects.installed)
"""Whether a file is Python's, an installed package's or this program's. Cached by file, because a file has many functions."""


class Named(NamedTuple):
    """A variable of a module."""

    label: str
    """The name that the code uses: `level`, or `config.level`."""
    around: dict[str, Any]
    """All variables of the module."""
    name: str

    @property
    def value(self) -> Any:
        """The variable's value; None if it does not exist yet."""
        return self.around.get(self.name)

    @property
    def is_builtin(self) -> bool:
        return self.name not in self.around and hasattr(builtins, self.name)


def names_of(function: FunctionType) -> list[Named]:
    """Return the variables of the script's modules to which a function refers, in an order that a restart does not change."""
    return [_found(function.__globals__, path) for path in _named_in(function.__code__)]


@functools.cache
def _named_in(code: CodeType) -> list[tuple[str, ...]]:
    """Return the dotted names to which code refers. Cached, because each worker reads the same code."""
    return sorted(set(_paths(code)))


def _paths(code: CodeType) -> Iterator[tuple[str, ...]]:
    """Yield the names in the module to which code refers, split at the dots: `config.level` as two parts."""
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
    """Return the first variable on a path that is not a module of the script. If the path has no such variable, return the end of the
    path."""
    at = 1
    while at < len(path) and _is_script_module(module := around.get(path[at - 1])):
        around, at = vars(module), at + 1
    return Named(".".join(path[:at]), around, path[at - 1])


def _is_script_module(thing: Any) -> bool:
    return isinstance(thing, ModuleType) and not installed(getattr(thing, "__file__", None))


def methods(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """Yield the methods that the script has written, including those of base classes."""
    for each in kind.__mro__:
        for name, method in vars(each).items():
            for function in _functions(method):
                if not installed(function.__code__.co_filename):
                    yield f"{each.__name__}.{name}", function


def _functions(method: Any) -> Iterator[FunctionType]:
    """Yield the functions inside a method, a property, or a method with cached results."""
    if isinstance(method, property):
        parts: tuple[Any, ...] = (method.fget, method.fset, method.fdel)
    else:
        parts = (getattr(method, "__func__", getattr(method, "func", method)),)
    for part in parts:
        if isinstance(part, FunctionType | functools._lru_cache_wrapper):  # created by a decorator
            part = vars(part).get("__wrapped__", part)
        if isinstance(part, FunctionType):
            yield part


@functools.cache
def of_script(kind: Any) -> bool:
    """Return whether the script has written this class itself, or a class from which it derives."""
    return not installed(side_effects.module_file(kind)) or any(methods(kind))


def is_own(thing: Any) -> bool:
    """Return whether the object has attributes set by the script, and does not belong to the training."""
    kind: Any = type(thing)
    if kind in PLAIN or issubclass(kind, (type, ModuleType, FunctionType)):
        return False
    return (issubclass(kind, BAGS) or of_script(kind)) and not apart(thing)


def apart(thing: Any) -> bool:
    """Return whether the object belongs to the training or to this package, or is one of torch's iterators."""
    if issubclass(type(thing), torch.nn.Module):  # the module's own `parameters` may be another function
        return next(torch.nn.Module.parameters(thing), None) is not None
    ours = str(type(thing).__module__).startswith(f"{__package__.partition('.')[0]}.")
    return ours or issubclass(type(thing), (torch.optim.Optimizer, _BaseDataLoaderIter))


def goes_on_with(kind: type, name: str) -> bool:
    """Return whether the class's `__iter__` reads the attribute before setting it. tqdm.auto's class keeps such an attribute only for
    `async for`."""
    code = getattr(kind.__iter__, "__code__", None)  # type: ignore[attr-defined]
    if code is None:
        return True
    for each in dis.get_instructions(code):
        if each.opcode in _JUMPS:  # what follows depends on a condition
            break
        if each.argval == name and each.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"):
            return each.opname != "STORE_ATTR"
    return name in code.co_names
