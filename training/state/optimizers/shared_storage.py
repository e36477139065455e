"""Tensors of one optimizer that share memory, with any sequence, type and gaps: record them, and rebuild the shared memory.

When a snapshot is taken, `Lying` records each tensor's memory and finds shared memory. In a restore, `Memories` places each tensor in live
or new memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from ....checkpoint.arena.staging import refuse
from ....resilience.errors import SnapshotError
from ..tensors.tensor_subclasses import only
from ..values.array_views import address, memory_of

Told: TypeAlias = list[Any]
"""A list that describes a memory: its size in bytes and, for each tensor in it, the tensor's number or a parameter's position, the offset
of its first byte, and its strides."""


class Lying:
    """Records in which memory each tensor lies."""

    def __init__(self) -> None:
        self._in: dict[int, list[tuple[int, torch.Tensor]]] = {}
        """Tensors by the address of their memory."""

    def note(self, number: int, tensor: torch.Tensor) -> None:
        if lies := address(tensor):
            self._in.setdefault(lies, []).append((number, tensor))

    def shared(self, parameters: Mapping[str, torch.Tensor]) -> dict[int, Told]:
        """Return the memories that several tensors share, by address. The `parameters` that lie in such a memory are included."""
        lenders: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for place, parameter in parameters.items() if self._in else ():
            here = _plain(parameter)
            if here is not None and (lies := address(here)) in self._in:
                lenders.setdefault(lies, []).append((place, here))
        found: dict[int, Told] = {}
        for lies, inside in self._in.items():
            all_in = [*lenders.get(lies, ()), *inside]
            if len(all_in) > 1:
                told = ([key, _first_byte(each), list(each.stride())] for key, each in all_in)
                found[lies] = [inside[0][1].untyped_storage().nbytes(), *told]
        return found


class Memories:
    """The recorded shared memories, for one restore."""

    def __init__(
        self, told: Sequence[Told], parameters: Mapping[str, torch.Tensor], apart: Collection[int] = frozenset()
    ) -> None:
        """apart: addresses of live memory that several tensors share now. A tensor that had its own memory in the snapshot is not filled
        there."""
        self._told, self._apart, self._parameters = told, apart, parameters
        self._places = {each[0]: (at, *each[1:]) for at, (_, *inside) in enumerate(told) for each in inside}
        self._made: dict[int, torch.Tensor] = {}
        live = (_plain(each) for each in parameters.values()) if told else ()
        self._taken = {address(each) for each in live if each is not None}

    def has(self, number: int) -> bool:
        return number in self._places

    def may_fill(self, live: torch.Tensor) -> bool:
        return not self._apart or address(live) not in self._apart

    def place(self, number: int, kept: torch.Tensor, live: Any, device: torch.device) -> Any:
        """Return the tensor with this number, unfilled: the live tensor if it already lies where the snapshot recorded the tensor, else a
        new tensor at the recorded place."""
        at, first, strides = self._places[number]
        here = _plain(live) if isinstance(live, torch.Tensor) else None
        if at not in self._made:
            self._made[at] = self._memory(at, here, first, device if here is None else here.device)
        storage = self._made[at].untyped_storage()
        there = here is not None and (address(here), _first_byte(here)) == (storage.data_ptr(), first)
        if there and (here.dtype, here.shape, [*here.stride()]) == (kept.dtype, kept.shape, strides):  # type: ignore[union-attr]
            return live
        made = torch.empty(0, dtype=kept.dtype, device=self._made[at].device)
        return made.set_(storage, first // made.element_size(), kept.shape, strides)

    def _memory(self, at: int, here: torch.Tensor | None, first: int, device: torch.device) -> torch.Tensor:
        """Return all bytes of a memory: a parameter's memory or the live tensor's if its size and offset match the record, otherwise new
        memory."""
        size, (key, offset, _) = self._told[at][:2]
        known = _plain(self._parameters[key]) if key in self._parameters else None
        if known is not None and _fits(known, size, offset):
            return memory_of(known)
        if here is not None and _fits(here, size, first) and address(here) not in self._taken:
            self._taken.add(address(here))
            return memory_of(here)
        made = torch.zeros(size, dtype=torch.uint8, device=device)
        for key, begins, strides in self._told[at][1:]:
            lender: Any = self._parameters.get(key)
            plain = lender is not None and _plain(lender) is lender
            if plain:
                # During training, the optimizer moved the parameter into its own memory by `parameter.data = …`, as this code does.
                part = torch.empty(0, dtype=lender.dtype, device=device)
                part.set_(made.untyped_storage(), begins // lender.element_size(), lender.shape, strides)
                lender.data = part.copy_(lender.detach())
        return made


def _fits(tensor: torch.Tensor, size: int, first: int) -> bool:
    return (tensor.untyped_storage().nbytes(), _first_byte(tensor)) == (size, first)


def _first_byte(tensor: torch.Tensor) -> int:
    return tensor.storage_offset() * tensor.element_size()


def _plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the one ordinary tensor that this tensor consists of, or None if it has no plain bytes."""
    try:
        here = only(tensor, "")
        refuse("", here)
    except SnapshotError:
        return None
    return here
