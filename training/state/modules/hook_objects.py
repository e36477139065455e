"""What hooks of the script's move on with: an object that is called, or the object of a bound method.

They are those that are there when the loop begins: a restart registers them again in the same order, and finds them by it. What a function
has in its closure is left alone: it mostly is for the eye (activations, open files), and a part of it without the rest does harm.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch.nn import Module

from .attribute_rules import is_scripts_object

_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

Held: TypeAlias = Callable[[], Any]
"""Gives the object that a hook has; None once the hook is removed."""


def of_modules(modules: Mapping[str, Module]) -> Iterator[tuple[str, Held]]:
    """By place, what hooks of these modules and of their parameters have."""
    for path, module in modules.items():
        yield from _of(path, module, _OF_MODULES)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield from _of(f"{path}.{name}" if path else name, parameter, _OF_PARAMETERS)


def of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Held]]:
    """By place, what hooks of its steps have."""
    return _of("", optimizer, OF_OPTIMIZERS)


def _of(path: str, thing: Any, kinds: Iterable[str]) -> Iterator[tuple[str, Held]]:
    for kind in kinds:
        hooks = getattr(thing, kind, None) or {}
        for number, (key, hook) in enumerate(hooks.items()):
            for place, held in _within(f"{path}{kind}[{number}]", hook):
                yield place, functools.partial(_if_there, hooks, key, held)


def _if_there(hooks: Mapping[Any, Any], key: Any, held: Any) -> Any:
    return held if key in hooks else None


def _within(place: str, hook: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(hook, functools.partial):
        for number, each in enumerate((hook.func, *hook.args, *hook.keywords.values())):
            yield from _within(f"{place}.{number}", each)
    elif is_scripts_object(hook):
        yield place, hook.__self__ if isinstance(hook, types.MethodType) else hook
