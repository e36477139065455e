"""The modules of the Session and their tensors, by name. If a value contains one of them, or its `id()`, a snapshot stores a reference to
it.

A dict keyed by module (`self.factors[layer]`) or by `id(parameter)` refers to the module or parameter, not to an address, which a restart
changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from ....checkpoint.format.pytree import Tagged
from .borrowed_memory import Lenders
from .class_adapters import NotFound

_LEAST_ID, _LAST_ID = 1 << 32, (1 << 48) - 1
"""Objects lie in memory between these addresses. Numbers outside, such as counters, times in nanoseconds and most hashes, are not looked up
as ids of objects."""


class Parts:
    """The modules and their tensors at one moment. The sources (saved objects) are only asked when the answer is needed."""

    def __init__(self, lenders: Lenders) -> None:
        self._lenders = lenders
        self._modules: dict[str, Any] = {}
        """The modules of each source by path, by the source's name."""
        self._places: dict[int, list[str]] | None = None
        """The places (source, path, tensor name) of modules and their tensors, by id."""

    def said(self, thing: torch.nn.Module | torch.nn.Parameter) -> Tagged | None:
        """Return the reference that a snapshot stores for the object; None if the object is not part of a model of the Session."""
        place = self._all().get(id(thing))
        return None if place is None else Tagged(("part", place))

    def noted(self, number: int) -> Tagged | None:
        """Return the reference that a snapshot stores for the module or tensor with this id; None if there is none."""
        place = self._all().get(number) if _LEAST_ID <= number <= _LAST_ID else None
        return None if place is None else Tagged(("id", Tagged(("part", place))))

    def find(self, source: str, path: str, tensor: str = "") -> Any:
        """Return the module or tensor to which a snapshot refers. Raises NotFound if it is missing."""
        if source not in self._modules and source in self._lenders.modules:
            self._modules[source] = self._lenders.modules[source]()
        found = self._modules.get(source, {}).get(path)
        if tensor and found is not None:
            found = found._parameters.get(tensor, found._buffers.get(tensor))
        if found is None:
            raise NotFound(f"it refers to {'.'.join(filter(None, (source, path, tensor)))}, which does not exist")
        return found

    def label(self, key: Any, otherwise: Any) -> Any:
        """Return a label for a mapping's key that a restart does not change. If the key is a module or tensor, or the id of one, the label
        is that object's name. For any other key the label is `otherwise`."""
        if isinstance(key, (torch.nn.Module, torch.Tensor)):
            key = id(key)
        place = self._all().get(key) if type(key) is int and _LEAST_ID <= key <= _LAST_ID else None
        return otherwise if place is None else ".".join(filter(None, place))

    def join(self, place: str, keys: Iterable[Any]) -> str:
        """Return `place` and the labels of `keys`, joined by dots."""
        return ".".join([place, *(str(self.label(key, key)) for key in keys)])

    def has_any(self, numbers: Collection[Any]) -> bool:
        """Return whether one of the numbers is the id of a module or tensor."""
        return not self._all().keys().isdisjoint(numbers)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the parameters of all modules."""
        for ask in self._lenders.modules.values():
            yield from (each for module in ask().values() for each in module._parameters.values() if each is not None)

    def _all(self) -> dict[int, list[str]]:
        if self._places is None:
            self._modules = {source: ask() for source, ask in self._lenders.modules.items()}
            self._places = {}
            for source, modules in self._modules.items():
                for path, module in modules.items():
                    self._places.setdefault(id(module), [source, path])
                    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                        if tensor is not None:
                            self._places.setdefault(id(tensor), [source, path, name])
        return self._places


def may_be_ids(numbers: Collection[Any]) -> bool:
    """Return whether the first number may be an id. The first is enough, because a list of ids contains nothing else."""
    first = next(iter(numbers), None)
    return type(first) is int and _LEAST_ID <= first <= _LAST_ID


def keys_may_be_ids(keys: Collection[Any]) -> bool:
    """Return whether an id may be among the keys, which are all texts or numbers."""
    kinds = set(map(type, keys))
    if int not in kinds:
        return False
    numbers = keys if kinds == {int} else [key for key in keys if type(key) is int]
    return max(numbers) >= _LEAST_ID and any(_LEAST_ID <= number <= _LAST_ID for number in numbers)
