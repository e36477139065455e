"""Find other sources (objects that the Session saves) in the attributes of modules and of the script's objects: optimizers, schedulers,
further modules, objects with a `state_dict`."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn import Module

from ....checkpoint.format.pytree_walk import PLAIN
from ...warm.side_effects import is_scripts
from ..values.array_views import TENSORS, address
from ..values.borrowed_memory import Loans
from ..values.class_adapters import OBJECT, kind_of
from ..values.kind import class_of, is_source, slot_values, slots_of
from ..values.session_parts import Parts
from .attribute_rules import WRAPPERS, declares, looked_at, owner_of
from .module_tensors import join

_LEVELS = 4
"""The depth to which nested containers in an attribute are searched."""
_LEVELS_OF_OBJECTS = 3
"""The deepest nesting of objects that is searched for objects with a state of their own."""
_FEW = 256
"""The most elements of a container that is searched. A longer container is taken to have no such objects."""
_EASY = frozenset((*PLAIN, *TENSORS))


def borrows(value: Any, loans: Loans) -> bool:
    """Whether the value is a tensor that lies in the memory of a model or an optimizer."""
    dense = type(value) in TENSORS and value.layout is torch.strided and not value.is_nested
    return dense and loans.of(value, address(value)) is not None


def sources_within(modules: Mapping[str, Any], labels: Parts) -> Iterator[tuple[str, Any]]:
    """Yield the optimizers, schedulers and objects with a `state_dict` in attributes of modules, each with its path. Also yield modules
    that are not registered as submodules, such as a teacher in a list, which is not trained."""
    parts = set(map(id, modules.values()))
    for path, module in modules.items():
        kind: Any = type(module)
        owner = owner_of(kind)
        for name, value in looked_at(module, owner) if owner else ():
            optimizer = isinstance(value, torch.optim.Optimizer)
            for keys, each in [((), value)] if optimizer else search(value, is_source_apart, members, _LEVELS):
                if id(each) not in parts:
                    yield labels.join(join(path, name), keys), each


def search(
    value: Any, wanted: Callable[[Any], bool], inside: Callable[[Any], Iterable[tuple[Any, Any]]], levels: int
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the wanted objects in a value, each with the keys that lead to it. inside: returns a value's parts with their keys. levels:
    the deepest nesting that is searched."""
    if wanted(value):
        yield (), value
    elif levels:
        for key, each in [*inside(value)]:
            for keys, found in search(each, wanted, inside, levels - 1):
                yield (key, *keys), found


def is_source_apart(value: Any) -> bool:
    """Whether the value is saved as a source of its own: a model, an optimizer, a scheduler, an object with a `state_dict`."""
    if isinstance(value, torch.optim.Optimizer):
        # Frameworks such as Accelerate keep the optimizers that they wrap in lists of their own.
        return type(value).__module__.partition(".")[0] not in WRAPPERS
    return isinstance(value, (Module, torch.optim.lr_scheduler.LRScheduler)) or declares(value)


def members(value: Any) -> Collection[tuple[Any, Any]]:
    """Return a container's members with their keys. The result is empty if all members are plain values and tensors."""
    if not isinstance(value, (dict, list, tuple)):
        return ()
    if _EASY.issuperset(map(type, value.values() if isinstance(value, dict) else value)):
        return ()
    return value.items() if isinstance(value, dict) else [*enumerate(value)]


def sources_in(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield each object with a state of its own, after the keys and attributes that lead to it from `value`."""
    return search(value, is_source_apart, _inside, _LEVELS_OF_OBJECTS)


def _inside(value: Any) -> Collection[tuple[Any, Any]]:
    if is_source(class_of(value)):
        return ()
    apart = isinstance(value, types.SimpleNamespace) or is_own_object(value)
    pairs = own_attributes(value).items() if apart else members(value)
    return pairs if len(pairs) <= _FEW else ()


def is_own_object(value: Any) -> bool:
    """Whether `value` is an instance of a class of the script that has no `state_dict`."""
    kind = class_of(value)
    known = None if type(value) in PLAIN or is_source(kind) else kind_of(kind)
    of_script = known is not None and known.name == OBJECT and is_scripts(kind.__module__)
    return of_script and bool(slots_of(kind) or hasattr(value, "__dict__"))


def own_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes in the object's `__dict__` and in its slots."""
    return {**getattr(value, "__dict__", {}), **slot_values(value)}
