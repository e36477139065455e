"""The hooks of modules, parameters and optimizers that exist when the loop begins: the objects that they change from call to call, and the
hooks that the script removes while it trains. A restart registers them again in the same order, which identifies them.

A hook's object is a callable object, or the object of a bound method. A function's closure is not saved. Most closures serve inspection
(activations, open files), and restoring only a part of a closure does harm. Frameworks manage their own hooks.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import Module

from ...warm.side_effects import is_scripts
from .attribute_rules import is_scripts_function, is_scripts_object
from .module_tensors import join

_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_BESIDE = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
"""Further tables of a module that describe its hooks, under the same keys."""
_FILLED = (list, dict, torch.Tensor, torch.nn.Parameter, np.ndarray)
"""Types of arguments in a partial that the partial's function may change from call to call."""


class Hook(NamedTuple):
    table: MutableMapping[Any, Any]
    key: Any
    hook: Any
    beside: Sequence[tuple[MutableMapping[Any, Any], Any]]
    """The further tables that list the hook, each with its entry for the hook."""


class Hooks:
    """The hooks of modules and their parameters, or of one optimizer."""

    def __init__(self, found: Iterable[tuple[str, Hook]] = ()) -> None:
        self._objects: dict[str, tuple[Hook, Any]] = {}
        """The objects inside the hooks, by the hook's name and the object's place in it."""
        self._scripts: dict[str, Hook] = {}
        """The script's hooks, by name."""
        self.add(found)

    def add(self, found: Iterable[tuple[str, Hook]]) -> dict[str, Any]:
        """Record the hooks of new modules. Return the objects in them."""
        objects = {}
        for name, hook in found:
            for place, each in _within(name, hook.hook):
                self._objects.setdefault(place, (hook, each))
                objects[place] = each
            if _is_scripts_hook(hook.hook):
                self._scripts.setdefault(name, hook)
        return objects

    def objects(self) -> dict[str, Any]:
        """Return the object in each hook, by the hook's name; None for a hook that was removed."""
        return {place: each if hook.key in hook.table else None for place, (hook, each) in self._objects.items()}

    def gone(self) -> dict[str, str]:
        """Return the name of the function or class that each removed hook calls, by the hook's name."""
        return {name: _called(each.hook) for name, each in self._scripts.items() if each.key not in each.table}

    def restore(self, gone: Mapping[str, str]) -> None:
        """Remove the hooks listed in `gone`, and register all other recorded hooks again."""
        for name, each in self._scripts.items():
            if name in gone and gone[name] == _called(each.hook):
                for table in (each.table, *(table for table, _ in each.beside)):
                    table.pop(each.key, None)
            elif each.key not in each.table:
                _put_back(each)


def hooks_of_modules(modules: Mapping[str, Module]) -> Iterator[tuple[str, Hook]]:
    """Yield the hooks of these modules and of their parameters, each with its name: path, kind and number."""
    for path, module in modules.items():
        yield from _of(path, module, _OF_MODULES)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield from _of(join(path, name), parameter, _OF_PARAMETERS)


def hooks_of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Hook]]:
    """Yield the optimizer's step hooks, each with its name."""
    return _of("", optimizer, OF_OPTIMIZERS)


def _of(path: str, thing: Any, kinds: Iterable[str]) -> Iterator[tuple[str, Hook]]:
    tables = [vars(thing).get(name, {}) for name in _BESIDE] if isinstance(thing, Module) else []
    for kind in kinds:
        for number, (key, hook) in enumerate((table := getattr(thing, kind, None) or {}).items()):
            yield (
                f"{path}{kind}[{number}]",
                Hook(table, key, hook, [(each, each[key]) for each in tables if key in each]),
            )


def _within(place: str, hook: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(hook, functools.partial):
        for number, each in enumerate((hook.func, *hook.args, *hook.keywords.values())):
            yield from _within(f"{place}.{number}", each)
            if type(each) in _FILLED and _is_scripts_hook(hook.func):
                yield f"{place}.{number}", each
    elif is_scripts_object(hook):
        yield place, hook.__self__ if isinstance(hook, types.MethodType) else hook


def _is_scripts_hook(hook: Any) -> bool:
    """Whether the script defines the code that the hook calls."""
    kind: Any = type(hook)
    if kind is functools.partial:
        return _is_scripts_hook(hook.func)
    if kind is types.MethodType:
        return _is_scripts_hook(hook.__func__)
    return is_scripts_function(hook) if isinstance(hook, types.FunctionType) else is_scripts(kind.__module__)


def _put_back(hook: Hook) -> None:
    """Register a hook again at its old position. Hooks that were registered later have greater keys."""
    later = {key: hook.table.pop(key) for key in [*hook.table] if key > hook.key}
    hook.table[hook.key] = hook.hook
    hook.table.update(later)
    for table, value in hook.beside:
        table[hook.key] = value


def _called(hook: Any) -> str:
    """Return the name of the function or class that a hook calls. If a restart registers other hooks, the names differ and no hook is
    removed."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))
