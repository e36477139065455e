"""Find objects with a state of their own inside the script's objects: models, optimizers, schedulers, objects with a `state_dict`."""

from __future__ import annotations

import types
from collections.abc import Collection, Iterator
from typing import Any

from ...checkpoint.format.pytree_walk import PLAIN
from ..warm.side_effects import is_scripts
from .modules.attribute_sources import is_source_apart, members, search
from .values.class_adapters import OBJECT, kind_of
from .values.kind import class_of, is_source, slot_values, slots_of

_LEVELS = 3
"""The deepest nesting of objects that is searched for objects with a state of their own."""
_FEW = 256
"""The most elements of a container that is searched. A longer container is taken to have no such objects."""


def sources_in(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield each object with a state of its own, after the keys and attributes that lead to it from `value`."""
    return search(value, is_source_apart, _inside, _LEVELS)


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
