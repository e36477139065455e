"""What hooks of the script's move on with: an object that is called, the object of a bound method, and what a function has in its closure.

They are those that are there when the loop begins: a restart registers them again in the same order, and finds them by it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module

from .attribute_rules import is_constant, is_scripts, is_scripts_object, is_value

_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@dataclass(frozen=True)
class Held:
    """Something that a hook has, and where it has it."""

    get: Callable[[], Any]
    put: Callable[[Any], None]


def of_modules(modules: Mapping[str, Module]) -> Iterator[tuple[str, Held]]:
    """By place, what hooks of these modules and of their parameters hold."""
    for path, module in modules.items():
        yield from _of(path, module, _OF_MODULES)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield from _of(f"{path}.{name}" if path else name, parameter, _OF_PARAMETERS)


def of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Held]]:
    """By place, what hooks of its steps hold."""
    return _of("", optimizer, _OF_OPTIMIZERS)


def _of(path: str, thing: Any, kinds: Iterable[str]) -> Iterator[tuple[str, Held]]:
    for kind in kinds:
        for number, hook in enumerate((getattr(thing, kind, None) or {}).values()):
            yield from _within(f"{path}{kind}[{number}]", hook)


def _within(place: str, hook: Any) -> Iterator[tuple[str, Held]]:
    if isinstance(hook, functools.partial):
        for number, each in enumerate((hook.func, *hook.args, *hook.keywords.values())):
            yield from _within(f"{place}.{number}", each)
    elif isinstance(hook, types.FunctionType):
        yield from _closure(place, hook) if is_scripts(hook.__module__) else ()
    elif is_scripts_object(hook):
        held = hook.__self__ if isinstance(hook, types.MethodType) else hook
        yield place, Held(lambda: held, lambda value: None)


def _closure(place: str, function: types.FunctionType) -> Iterator[tuple[str, Held]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):

        def get(cell: types.CellType = cell) -> Any:
            try:
                return cell.cell_contents
            except ValueError:  # nothing is bound to the name
                return None

        def put(value: Any, cell: types.CellType = cell) -> None:
            cell.cell_contents = value

        if is_constant(content := get()) or is_value(type(content), object):
            yield f"{place}.{name}", Held(get, put)
