"""Values that use the memory of tensors in models and optimizers. The models and optimizers save these tensors themselves.

`best["weights"] = model.state_dict()` is no copy: it changes with the training. So a snapshot only names the tensor that lends its memory,
as the tensor's source (the saved model or optimizer) names it. After a restart, the value uses that tensor's memory again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from ....checkpoint.format.pytree import Tagged
from .array_views import TENSORS, address, memory_of, root_of
from .class_adapters import NotFound
from .shared_objects import Sharing

Place: TypeAlias = tuple[str, str]
"""The name of a source, and the source's name for one of its tensors, or for a mapping of tensors."""
Held: TypeAlias = tuple[int, int]
"""The number of references to a tensor, and the number of references to its memory."""
Lender: TypeAlias = Callable[[], Mapping[str, Any]]
"""A function that returns the tensors and mappings whose memory a source lends now, by name."""


class Lenders:
    """All sources whose memory other values may use, and all other objects that the Session knows by name."""

    def __init__(self) -> None:
        self._asked: dict[str, Lender] = {}
        self.modules: dict[str, Callable[[], Mapping[str, torch.nn.Module]]] = {}
        """By the name of a source, the function that returns this source's modules by path."""
        self.sources: dict[str, Any] = {}
        self.names: dict[int, str] = {}
        """Names of the sources, by id."""
        self.sharing = Sharing()

    def __bool__(self) -> bool:
        return bool(self._asked)

    def add(self, source: str, lender: Lender) -> None:
        self._asked[source] = lender

    def things(self) -> dict[Place, Any]:
        return {(source, name): each for source, ask in self._asked.items() for name, each in ask().items()}


class Loans:
    """The tensors and mappings that each source lends at one moment. The sources are only asked when the answer is needed."""

    def __init__(self, lenders: Lenders) -> None:
        self._lenders = lenders
        self._things: dict[Place, Any] | None = None
        self._known: tuple[dict[int, list[tuple[Place, Any]]], dict[int, Place]] | None = None

    def __bool__(self) -> bool:
        return bool(self._lenders)

    def find(self, source: str, name: str) -> Any:
        """Return the tensor or mapping to which a snapshot refers. Raises NotFound if it is missing."""
        if self._things is None:
            self._things = self._lenders.things()
        if (source, name) not in self._things:
            raise NotFound(f"it refers to {name!r} of {source!r}, which does not exist")
        return self._things[source, name]

    def of(self, thing: Any, lies_in: int) -> tuple[Place, Any] | None:
        """Return the tensor that lends a tensor or array all its memory, with that tensor's place; None if there is none. lies_in: the
        memory's address."""
        if type(thing) is np.ndarray:
            owner = root_of(thing).base
            if not isinstance(owner, torch.Tensor):
                return None
            lies_in = address(owner)
        tensors, _ = self._known or self._look()
        found = tensors.get(lies_in, ())
        if not found:
            return None
        first, last = _extent(thing)
        for place, lender in found:
            begin, end = _extent(lender)
            if begin <= first < last <= end:
                return place, lender
        return None

    def mappings(self) -> Mapping[int, Place]:
        """Return the places of the mappings that sources lend, by the mapping's id."""
        return (self._known or self._look())[1]

    def _look(self) -> tuple[dict[int, list[tuple[Place, Any]]], dict[int, Place]]:
        tensors: dict[int, list[tuple[Place, Any]]] = {}
        mappings: dict[int, Place] = {}
        for place, each in (self._things or self._lenders.things()).items():
            if type(each) not in TENSORS:
                mappings[id(each)] = place
            elif each.layout is torch.strided and not each.is_nested and (where := address(each)):
                tensors.setdefault(where, []).append((place, each))
        self._known = tensors, mappings
        return self._known


_count = getattr(torch._C, "_storage_Use_Count", lambda storage: 1 << 30)
STATE = "state "
"""Prefix of the names that an optimizer gives to the state of a parameter, and to a tensor in that state."""


def holders(tensor: Any) -> int:
    """Return the number of tensors and other owners that share the memory; a large number if torch does not tell."""
    return int(_count(tensor.untyped_storage()._cdata))


def memory_said(place: Place, lender: Any, array: bool) -> Tagged:
    """Return the record with which a snapshot refers to the memory of a lending tensor."""
    return Tagged(("memory", [*place, list(lender.stride()), array]))


def memory_again(loans: Loans, content: Any) -> Any:
    """Return the memory to which a snapshot refers, as bytes. Raises NotFound if it is missing or laid out differently."""
    source, name, strides, array = content
    lender = loans.find(source, name)
    if type(lender) not in TENSORS or list(lender.stride()) != strides:
        raise NotFound(f"it is a view of {name} of {source}, which has another memory layout now")
    first, last = _extent(lender)
    offset = lender.storage_offset() * lender.element_size()
    found = memory_of(lender)[offset : offset + last - first]
    return found.numpy() if array else found


def offset_in(lender: Any, thing: Any) -> int:
    """Return the offset of the first element of `thing` from the lender's first element, in bytes."""
    where = int(thing.__array_interface__["data"][0]) if type(thing) is np.ndarray else thing.data_ptr()
    return int(where) - int(lender.data_ptr())


def lent_by_groups(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the tensors among the values of an optimizer's groups."""
    values = ((n, key, value) for n, group in enumerate(groups) for key, value in group.items())
    return {f"group {n} {key}": value for n, key, value in values if type(value) in TENSORS}


def _extent(thing: Any) -> tuple[int, int]:
    """Return the address of the first byte, and the address just after the last byte."""
    if type(thing) is np.ndarray:
        where, strides, size = int(thing.__array_interface__["data"][0]), list(thing.strides), thing.itemsize
        filled = thing.size > 0
    else:
        size = thing.element_size()
        where, strides = thing.data_ptr(), [stride * size for stride in thing.stride()]
        filled = thing.numel() > 0
    if not filled:
        return where, where
    ends = [(length - 1) * stride for length, stride in zip(thing.shape, strides, strict=True)]
    return where + sum(min(0, each) for each in ends), where + sum(max(0, each) for each in ends) + size
