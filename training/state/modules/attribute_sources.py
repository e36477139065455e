"""What attributes of modules hold of other sources: optimizers, schedulers and further modules; and memory that is theirs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn import Module

from ....checkpoint.format.pytree_walk import Walk
from ....resilience.errors import SnapshotError
from ..values.array_views import TENSORS, address
from ..values.borrowed_memory import Loans
from .attribute_rules import looked_at, owner_of
from .module_tensors import join


def borrows(value: Any, loans: Loans) -> bool:
    """Whether tensors of models or optimizers are in a value."""
    try:
        leaves = Walk(value).leaves
    except SnapshotError:
        return False
    tensors = (leaf for leaf in leaves if type(leaf) in TENSORS and leaf.layout is torch.strided and not leaf.is_nested)
    return any(loans.of(tensor, address(tensor)) for tensor in tensors)


def sources_within(modules: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Optimizers and schedulers that modules hold as attributes, and modules that they hold as no part of their own (a teacher in a list,
    so that it is not trained), by their places."""
    parts = set(map(id, modules.values()))
    for path, module in modules.items():
        kind: Any = type(module)
        owner = owner_of(kind)
        for name, value in looked_at(module, owner) if owner else ():
            place = join(path, name)
            if isinstance(value, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)):
                yield place, value
            held = value.items() if type(value) is dict else enumerate(value) if type(value) in (list, tuple) else ()
            for key, each in (("", value), *((f".{key}", each) for key, each in held)):
                if isinstance(each, Module) and id(each) not in parts:
                    yield f"{place}{key}", each
