"""Presents a snapshot's content to other formats, under names that are the same in every layout.

manifests of all ranks → whole tensors by name, and the other values, each listed once.

A tensor that is part of a global tensor has the global name: `model/decoder.layers.0.mlp.linear_fc1.weight`,
`optimizer/exp_avg/decoder.layers.0.mlp.linear_fc1.weight`. Any other tensor or value that is the same on all ranks keeps its name. A value
that differs from rank to rank (generators) gets the rank as a prefix: `rank-00003/randomness/torch`. A source is an object that the Session
saves, such as `model`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...resilience.errors import SnapshotError
from ..backend import paths
from ..format.manifest import RankManifest
from ..format.replica_agreement import trained_by
from ..format.sharding import Part, Shape, covers
from ..format.tensor_table import ITEM_BYTES, Piece
from .load_resharded import Saved, Wanted, word, words
from .optimizer_view import exactly, is_optimizer, optimizer_values, pieces, without_tensors
from .replica_copies import apart

BATCH_BYTES = 256 << 20
"""Maximum bytes that an export reads at a time, unless one tensor is larger."""

Words = NDArray[np.generic]
"""Elements of a tensor as uninterpreted words of an element's size."""


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A whole tensor that can be read."""

    name: str
    dtype: str
    shape: Shape
    own: tuple[int, Piece] | None = None
    """Rank and piece of a tensor that is not part of a global tensor."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Contents:
    """A snapshot's tensors and values, as converters to other formats use them."""

    def __init__(self, saved: Saved, only: Collection[str] = ()) -> None:
        """only: the sources that are used; empty: all. Raises SnapshotError if a global tensor is incomplete, or the table claims more
        elements than its bytes can contain. Raises LayoutError if ranks have trained different values of a tensor that counts as one."""
        self.saved = saved
        trained = set[str]().union(*(trained_by(manifest.table) for manifest in saved.manifests))
        self.apart = apart(saved, lambda name: name not in trained, only or None)
        """The names of global tensors that differ from rank to rank, such as buffers. Their values are those of replica 0."""
        self.tensors: dict[str, Tensor] = {}
        """The tensors by name, sorted."""
        self.values: dict[str, Any] = {}
        """All values that are not tensors, by source; or under `rank-00003`, then by source, if they differ from rank to rank. An optimizer
        has `param_groups`, each with its `params`, and the loss `scaler`."""
        found = [_global(saved, name) for name in saved.boxes]
        described = saved.described
        if not all(isinstance(state, dict) for state in described):
            raise SnapshotError(f"{saved.snapshot}: its state is no dict of sources; it is damaged")
        for source in dict.fromkeys(str(name) for state in described for name in state):
            kept = [state.get(source) for state in described]
            if all(is_optimizer(state) for state in kept):
                self.values[source] = optimizer_values(saved, source, kept)
                continue
            first, *others = (_told(manifest, state) for manifest, state in zip(saved.manifests, kept, strict=True))
            if all(other == first for other in others):
                found += self._own(0, source, kept[0], "")
            else:
                for rank, state in enumerate(kept):
                    found += self._own(rank, source, state, f"{paths.slab_name(rank)}/")
        self.tensors = {tensor.name: tensor for tensor in sorted(found, key=lambda tensor: tensor.name)}

    def _own(self, rank: int, source: str, state: Any, prefix: str) -> list[Tensor]:
        """Record one rank's values of a source. Return the rank's tensors that are not part of a global tensor."""
        target = self.values.setdefault(prefix.rstrip("/"), {}) if prefix else self.values
        plain = without_tensors(state)
        if plain not in ({}, None):
            target[source] = plain
        if prefix and not target:
            del self.values[prefix.rstrip("/")]
        return [
            Tensor(name=f"{prefix}{piece.name}", dtype=piece.dtype, shape=piece.shape, own=(rank, piece))
            for piece in pieces(state)
            if not piece.parts
        ]

    def read(self, tensors: Sequence[Tensor]) -> list[Words]:
        """Return the tensors' elements, row-major. Raises as `Saved.fill` does."""
        found = [words(t.dtype, t.shape, t.name) for t in tensors]
        wanted = [
            Wanted(t.name, t.dtype, [_box(t, (0,) * len(t.shape), t.shape)], memory)
            for t, memory in zip(tensors, found, strict=True)
            if t.own is None
        ]
        self.saved.fill(wanted)
        for tensor, memory in zip(tensors, found, strict=True):
            if tensor.own is not None:
                memory[...] = self.saved.content(*tensor.own).view(word(tensor.dtype))
        return found

    def read_box(self, tensor: Tensor, offset: Shape, box: Shape) -> Words:
        """Return the elements of a box of `tensor`, row-major. Reads only the chunks that contain the box. Raises as `Saved.fill` does."""
        if tensor.own is not None:
            (whole,) = self.read([tensor])
            at = tuple(slice(o, o + n) for o, n in zip(offset, box, strict=True))
            return whole.reshape(tensor.shape)[at].reshape(-1)
        memory = words(tensor.dtype, box, tensor.name)
        self.saved.fill([Wanted(tensor.name, tensor.dtype, [_box(tensor, offset, box)], memory)])
        return memory


def batches(tensors: Sequence[Tensor], limit_bytes: int = BATCH_BYTES) -> Iterator[list[Tensor]]:
    """Yield the tensors in the given order, in batches of at most `limit_bytes`. A larger tensor is a batch of its own."""
    batch: list[Tensor] = []
    total = 0
    for tensor in tensors:
        if batch and total + tensor.nbytes > limit_bytes:
            yield batch
            batch, total = [], 0
        batch.append(tensor)
        total += tensor.nbytes
    if batch:
        yield batch


def _box(tensor: Tensor, offset: Shape, box: Shape) -> Part:
    return Part(name=tensor.name, shape=tensor.shape, offset=offset, box=box)


def _global(saved: Saved, name: str) -> Tensor:
    """Return the global tensor that the saved parts form. Raises SnapshotError unless they cover all of it with bytes that exist."""
    boxes, (dtype, shape) = saved.boxes[name], saved.shapes[name]
    held = sum(math.prod(box.part.box) for box in boxes)
    there = sum({(box.rank, box.piece): saved.piece(box).nbytes for box in boxes}.values())
    whole = Tensor(name=name, dtype=dtype, shape=shape)
    if not boxes and 0 not in shape:
        raise SnapshotError(f"{saved.snapshot}: it holds nothing of {name} {shape}; it is damaged")
    if any((saved.piece(box).dtype, box.part.shape) != (dtype, shape) for box in boxes):
        raise SnapshotError(f"{saved.snapshot}: its ranks disagree on what {name} is; it is damaged")
    places = [(box.part.offset, box.part.box) for box in boxes]
    if there < whole.nbytes or not covers(places, (0,) * len(shape), shape):
        raise SnapshotError(
            f"{saved.snapshot}: it holds {held} of the {math.prod(shape)} elements of {name} {shape}, in {there} bytes, or some "
            "of them twice; it is damaged, or its ranks have not saved all of it"
        )
    return whole


def _told(manifest: RankManifest, state: Any) -> tuple[str, list[tuple[str, str, Shape, str]]]:
    """Return a rank's values and tensors of a source, in a comparable form. The values are exact to the bit, so that equal NaNs compare
    equal. Each tensor that is not part of a global tensor is given with its fingerprint."""
    prints = dict(zip((piece.name for piece in manifest.table.pieces), manifest.fingerprints, strict=True))
    own = [(piece.name, piece.dtype, piece.shape, prints[piece.name]) for piece in pieces(state) if not piece.parts]
    return exactly(without_tensors(state)), own
