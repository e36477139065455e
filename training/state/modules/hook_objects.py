"""Objects that the script's hooks change from call to call: a callable object, or the object of a bound method.

Only hooks that exist when the loop begins are saved: a restart registers them again in the same order, which identifies them. A function's
closure is not saved. Most closures serve inspection (activations, open files), and restoring only a part of a closure does harm.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn import Module

from ...warm.side_effects import is_scripts
from .attribute_rules import is_scripts_function, is_scripts_object
from .module_tensors import join

_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

_FILLED = (list, dict, torch.Tensor, torch.nn.Parameter, np.ndarray)
"""Types of arguments in a partial that the partial's function may change from call to call."""

Held: TypeAlias = Callable[[], Any]
"""A function that returns the object that a hook contains, or None after the hook was removed."""


Hook: TypeAlias = tuple[str, Any, Any, Any]
"""The hook's name (path, kind and number); its module, parameter or optimizer; the mapping that contains the hook; its key in the
mapping."""


def hooks_of_modules(modules: Mapping[str, Module]) -> Iterator[Hook]:
    """Yield the hooks of these modules and of their parameters."""
    for path, module in modules.items():
        yield from _of(path, module, _OF_MODULES)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield from _of(join(path, name), parameter, _OF_PARAMETERS)


def hooks_of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[Hook]:
    """Yield the optimizer's step hooks."""
    return _of("", optimizer, OF_OPTIMIZERS)


def _of(path: str, thing: Any, kinds: Iterable[str]) -> Iterator[Hook]:
    for kind in kinds:
        hooks = getattr(thing, kind, None) or {}
        for number, key in enumerate(hooks):
            yield f"{path}{kind}[{number}]", thing, hooks, key


def objects_in(found: Iterable[Hook]) -> Iterator[tuple[str, Held]]:
    """Yield the objects in the hooks, each after its hook's name."""
    for place, _, hooks, key in found:
        for within, held in _within(place, hooks[key]):
            yield within, functools.partial(_if_there, hooks, key, held)


def _if_there(hooks: Mapping[Any, Any], key: Any, held: Any) -> Any:
    return held if key in hooks else None


def _within(place: str, hook: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(hook, functools.partial):
        for number, each in enumerate((hook.func, *hook.args, *hook.keywords.values())):
            yield from _within(f"{place}.{number}", each)
            if type(each) in _FILLED and is_scripts_hook(hook.func):
                yield f"{place}.{number}", each
    elif is_scripts_object(hook):
        yield place, hook.__self__ if isinstance(hook, types.MethodType) else hook


def is_scripts_hook(hook: Any) -> bool:
    """Whether the script defines the code that the hook calls."""
    kind: Any = type(hook)
    if kind is functools.partial:
        return is_scripts_hook(hook.func)
    if kind is types.MethodType:
        return is_scripts_hook(hook.__func__)
    return is_scripts_function(hook) if isinstance(hook, types.FunctionType) else is_scripts(kind.__module__)
