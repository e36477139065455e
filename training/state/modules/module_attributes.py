"""Plain attributes of modules, which torch knows nothing of: `self.calls += 1` in a forward pass, a moving average, a generator, the `p`
of a dropout that the script lowers.

A number, a text, a device: what never changes in itself is told where it is another one than when the loop began. Whatever else can be
taken apart and made again is told always. The rest (functions, modules, tensors with a graph behind them) stays as the script has it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import cache
from operator import is_
from typing import Any

import numpy as np
import torch
from torch.nn import Module

from ....checkpoint.format.pytree import Tagged
from ....checkpoint.format.pytree_walk import PLAIN, Walk, text
from ....resilience.errors import LayoutError, SnapshotError
from ...attach.rank_stderr import say
from ...warm.side_effects import installed
from ..values import type_adapters
from ..values.array_views import TENSORS, address
from ..values.borrowed_memory import Lenders, Loans
from ..values.class_adapters import GLOBAL, kind_of
from ..values.packing import MAPPINGS
from ..values.value_source import Known, Packed

_OF_EVERY_MODULE = frozenset(vars(Module()))
_LAYERS = "torch.nn.modules."
_CLOSED = ("megatron", "transformer_engine", "deepspeed", "apex")
_FRAMEWORKS = ("torch", "builtins", *_CLOSED)
_CONSTANTS = PLAIN.union(*(kind.types for kind in type_adapters.CHANGELESS))
_NOTHING: tuple[int, list[str], list[Any]] = (-1, [], [])


class Attributes:
    def __init__(self, modules: Mapping[str, Module], lenders: Lenders) -> None:
        """The loop begins. lenders: whose memory they may borrow."""
        self._lenders = lenders
        self._modules: dict[str, Module] = {}
        self._calm: dict[str, tuple[int, list[str], list[Any]]] = {}
        """How many attributes a module had when there was nothing to tell, and which ones are looked at."""
        self._packed = Packed("a module", Known(lenders))
        self._keeps: dict[tuple[str, str, type], bool] = {}
        self._began: dict[int, tuple[Module, dict[str, Any], set[str]]] = {}
        """Of each module, by id, as it was seen first: its constants and what borrows memory, which the script makes so again; and the
        names of all attributes."""
        self._dropped: set[tuple[str, str]] = set()
        """What was kept and could not be kept any more, as it was told."""
        self.look(modules)

    def look(self, modules: Mapping[str, Module]) -> None:
        """They may be others now."""
        self._modules = {path: module for path, module in modules.items() if _is_open(module)}
        loans = Loans(self._lenders)
        for module in self._modules.values():
            if id(module) not in self._began:
                began = {
                    n: v for n, v in _own(module) if _is_constant(v) or (not _is_layer(module) and _borrows(v, loans))
                }
                self._began[id(module)] = module, began, {name for name, _ in _own(module)}
        self._calm.clear()

    def collect(self) -> Any:
        """Empty where there is nothing to tell."""
        told = {}
        for path, module in self._modules.items():
            held, (count, names, values) = vars(module), self._calm.get(path, _NOTHING)
            if len(held) == count and all(map(is_, map(held.get, names), values)):
                continue
            if found := self._told(path, module):
                told[path] = found
            elif _is_layer(module) or all(_is_constant(value) for _, value in _own(module)):
                names = [name for name, _ in _own(module)]
                self._calm[path] = len(held), names, [held[name] for name in names]
        if not told:
            self._packed.trained = []
            return {}
        try:
            return Tagged(("", self._packed.pack(told)))
        except SnapshotError:  # something in it has become what can't be kept
            for path, found in told.items():
                for name, value in list(found.items()):
                    if why := self._against(value):
                        del found[name]
                        self._drop(path, name, why)
            return Tagged(("", self._packed.pack(told)))

    @property
    def trained(self) -> list[torch.Tensor]:
        """Tensors in what was collected last that may have gradients."""
        return self._packed.trained

    def restore(self, kept: Any) -> None:
        live = {path: dict(_own(module)) for path, module in self._modules.items()}
        told = self._packed.unpack(kept[1], live) if kept else {}
        if lost := told.keys() - self._modules.keys():
            raise LayoutError(f"the snapshot holds attributes of the module {min(lost)}, which this run has not")
        self._calm.clear()
        for path, module in self._modules.items():
            _, began, there = self._began[id(module)]
            attributes, wanted = vars(module), {**began, **told.get(path, {})}
            for name, value in list(_own(module)):
                came = name not in wanted and name not in there
                if came and (_is_constant(value) or self._keeps.get((path, name, type(value)))):
                    del attributes[name]
            attributes.update(
                {name: value for name, value in wanted.items() if attributes.get(name, wanted) is not value}
            )

    def _told(self, path: str, module: Module) -> dict[str, Any]:
        (_, began, _), layer = self._began[id(module)], _is_layer(module)
        return {
            name: value
            for name, value in _own(module)
            if (
                not _same(value, began.get(name, began))
                if _is_constant(value)
                else not layer and value is not began.get(name) and self._is_kept(path, name, value, type(module))
            )
        }

    def _is_kept(self, path: str, name: str, value: Any, owner: type) -> bool:
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            return False
        place = path, name, type(value)
        if place not in self._keeps:
            self._keeps[place] = _is_value(type(value), owner) and not self._against(value)
        return self._keeps[place]

    def _against(self, value: Any) -> str:
        """Why it does not come back from a snapshot as it is; empty where it does."""
        try:
            self._packed.prove(Packed("a module", Known(self._lenders)).pack(value))
        except SnapshotError as error:
            return str(error)
        return ""

    def _drop(self, path: str, name: str, why: str) -> None:
        if (path, name) not in self._dropped:
            self._dropped.add((path, name))
            at = f"{path}.{name}" if path else name
            say(f"the attribute {at} of a module is not kept any more, and a recovery goes on with another one: {why}")


def _borrows(value: Any, loans: Loans) -> bool:
    """Whether tensors of models or optimizers are in it."""
    try:
        leaves = Walk(value).leaves
    except SnapshotError:
        return False
    tensors = (leaf for leaf in leaves if type(leaf) in TENSORS and leaf.layout is torch.strided and not leaf.is_nested)
    return any(loans.of(tensor, address(tensor)) for tensor in tensors)


def sources_within(modules: Mapping[str, Module]) -> Iterator[tuple[str, Any]]:
    """Optimizers and schedules that modules hold as attributes, and modules that they hold as no part of their own (a teacher in a list, so
    that it is not trained), by their places."""
    parts = set(map(id, modules.values()))
    for path, module in modules.items():
        for name, value in _own(module) if _is_open(module) else ():
            place = f"{path}.{name}" if path else name
            if isinstance(value, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)):
                yield place, value
            held = value.items() if type(value) is dict else enumerate(value) if type(value) in (list, tuple) else ()
            for key, each in (("", value), *((f".{key}", each) for key, each in held)):
                if isinstance(each, Module) and id(each) not in parts:
                    yield f"{place}{key}", each


def _own(module: Module) -> Iterator[tuple[str, Any]]:
    layer = _is_layer(module)
    for name, value in vars(module).items():
        if name not in _OF_EVERY_MODULE and not (layer and name[:1] == "_"):
            yield name, value


def _is_constant(value: Any) -> bool:
    return type(value) in _CONSTANTS or (type(value) is tuple and PLAIN.issuperset(map(type, value)))


def _same(one: Any, other: Any) -> bool:
    if one is other or type(one) is not type(other):
        return one is other
    if type(one) is tuple:
        return len(one) == len(other) and all(map(_same, one, other))
    return text(one) == text(other) if type(one) in PLAIN else bool(one == other)


def _classes(module: Module) -> list[str]:
    return [kind.__module__ for kind in type(module).__mro__ if kind is not Module]


def _root(name: str) -> str:
    return name.partition(".")[0]


def _is_layer(module: Module) -> bool:
    """Whether it is one of torch's own, of which only numbers and texts with public names are looked at."""
    return all(_root(name) in _FRAMEWORKS for name in _classes(module))


def _is_open(module: Module) -> bool:
    """Whether what it keeps is the script's: torch's wrappers, and the modules of frameworks that shard, keep what belongs to a process."""
    names = _classes(module)
    if any(_root(name) in _CLOSED or name.startswith("torch.nn.parallel") for name in names):
        return False
    return not _is_layer(module) or any(name.startswith(_LAYERS) for name in names)


def _is_value(kind: type, owner: type) -> bool:
    """Whether such a thing belongs to the state: one of Python's, torch's or numpy's, of the package that the module is of, or of a file of
    the script's own."""
    known = kind_of(kind)
    if kind in (list, tuple, np.ndarray, *MAPPINGS, *TENSORS) or (
        known in (*type_adapters.CHANGELESS, *type_adapters.CHANGING)
    ):
        return True
    mine = {_root(each.__module__) for each in owner.__mro__} - {*_FRAMEWORKS}
    if known is None or known is GLOBAL:
        return False
    return _root(kind.__module__) in mine or _is_scripts(kind.__module__)


@cache
def _is_scripts(module: str) -> bool:
    """Whether it is the script, or a module that it has beside it."""
    origin = getattr(getattr(sys.modules.get(module), "__spec__", None), "origin", None)
    return module == "__main__" or not installed(origin)
