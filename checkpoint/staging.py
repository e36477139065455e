"""Tensors ⇄ a slot's payload: the training state is copied down by `Stager.stage`, and looked at again by `unstage`.

The only module of checkpoint/ that handles tensors; torch is imported when one arrives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..resilience.errors import SnapshotError
from . import tensors
from .tensors import Piece, Table
from .tree import Json

if TYPE_CHECKING:
    from typing import TypeAlias

    from torch import Tensor

    Leaf: TypeAlias = Tensor | np.ndarray[Any, Any]


def plan(skeleton: Json, leaves: Sequence[tuple[str, Leaf]]) -> Table:
    """Where each leaf will lie. Raises SnapshotError for one that has no plain bytes (sparse, quantized)."""
    for name, leaf in leaves:
        if not isinstance(leaf, np.ndarray) and str(leaf.layout) != "torch.strided":
            raise SnapshotError(f"tensor {name!r} is not dense ({leaf.layout}); it can't be saved")
    described = ((name, str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape)) for name, leaf in leaves)
    return tensors.plan(skeleton, described)


class Stager:
    """Copies states into payloads; remembers each payload's destination views, until the layout changes."""

    def __init__(self) -> None:
        self._pieces: tuple[Piece, ...] = ()
        self._views: dict[int, tuple[memoryview, list[Tensor]]] = {}

    def stage(self, leaves: Sequence[tuple[str, Leaf]], table: Table, payload: memoryview) -> None:
        """Copy the leaves, which `table` was planned for, into `payload`: any strides, any device."""
        import torch

        if table.pieces != self._pieces:
            self._pieces, self._views = table.pieces, {}
        known = self._views.get(id(payload))  # the view is kept along with its id, so the id can't come to mean another
        if known is None:
            _zero_gaps(table, payload)
            known = self._views[id(payload)] = payload, list(unstage(table, payload).values())
        with torch.no_grad():
            for (_, leaf), view in zip(leaves, known[1], strict=True):
                view.copy_(leaf if isinstance(leaf, torch.Tensor) else torch.from_numpy(np.array(leaf)))


def unstage(table: Table, payload: memoryview) -> Mapping[str, Tensor]:
    """Tensors by name that are views of `payload`, in the table's order: copy before the payload changes."""
    import torch

    def view(piece: Piece) -> Tensor:
        dtype = getattr(torch, piece.dtype)
        if piece.nbytes == 0:
            return torch.empty(piece.shape, dtype=dtype)
        raw = torch.frombuffer(payload, dtype=torch.uint8, count=piece.nbytes, offset=piece.offset)
        return raw.view(dtype).view(piece.shape)

    return {piece.name: view(piece) for piece in table.pieces}


def _zero_gaps(table: Table, payload: memoryview) -> None:
    """Make the payload's bytes depend on nothing but the state, whatever the slot held before."""
    end = 0
    for offset, nbytes in [*((piece.offset, piece.nbytes) for piece in table.pieces), (table.payload_bytes, 0)]:
        payload[end:offset] = bytes(offset - end)
        end = offset + nbytes
