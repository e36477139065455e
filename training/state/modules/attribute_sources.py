"""What attributes of modules hold of other sources: optimizers, schedulers and further modules; and memory that is theirs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch.nn import Module

from ....checkpoint.format.pytree_walk import PLAIN, Walk
from ....resilience.errors import SnapshotError
from ..values.array_views import TENSORS, address
from ..values.borrowed_memory import Loans
from ..values.session_parts import Parts
from .attribute_rules import WRAPPERS, declares, looked_at, owner_of
from .module_tensors import join

_LEVELS = 4
"""Of containers in an attribute."""
_EASY = frozenset((*PLAIN, *TENSORS))


def is_wrapped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a framework has put it into a list of its own."""
    return type(optimizer).__module__.partition(".")[0] in WRAPPERS


def borrows(value: Any, loans: Loans) -> bool:
    """Whether tensors of models or optimizers are in a value."""
    try:
        leaves = Walk(value).leaves
    except SnapshotError:
        return False
    tensors = (leaf for leaf in leaves if type(leaf) in TENSORS and leaf.layout is torch.strided and not leaf.is_nested)
    return any(loans.of(tensor, address(tensor)) for tensor in tensors)


def sources_within(modules: Mapping[str, Any], labels: Parts) -> Iterator[tuple[str, Any]]:
    """Optimizers, schedulers and objects with a state_dict that modules hold in attributes, and modules that they hold as no part of their
    own (a teacher in a list, so that it is not trained), by their places."""
    parts = set(map(id, modules.values()))
    for path, module in modules.items():
        kind: Any = type(module)
        owner = owner_of(kind)
        for name, value in looked_at(module, owner) if owner else ():
            for keys, each in _sources(value, 0):
                if id(each) not in parts:
                    yield labels.join(join(path, name), keys), each


def _sources(value: Any, level: int) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """With the keys that lead there."""
    if isinstance(value, (Module, torch.optim.lr_scheduler.LRScheduler)) or declares(value):
        yield (), value
    elif isinstance(value, torch.optim.Optimizer):
        if not (level and is_wrapped(value)):
            yield (), value
    elif level < _LEVELS:
        for key, each in members(value):
            for keys, found in _sources(each, level + 1):
                yield (key, *keys), found


def members(value: Any) -> Collection[tuple[Any, Any]]:
    """What a container holds, with its keys; nothing where all of it is plain values and tensors."""
    if not isinstance(value, (dict, list, tuple)):
        return ()
    if _EASY.issuperset(map(type, value.values() if isinstance(value, dict) else value)):
        return ()
    return value.items() if isinstance(value, dict) else [*enumerate(value)]
