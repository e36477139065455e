"""Tensors → a slot's image: the training state is copied down by `Stager.stage`; `fill.py` has the way up.

The only modules of checkpoint/ that handle tensors are these two and `format/fingerprint.py`; torch is imported when one arrives.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...resilience.errors import SnapshotError
from ..format import fingerprint, sharding, tensor_table
from ..format.pytree_walk import Form, Walk
from ..format.shard_image import Image
from ..format.sharding import Part
from ..format.tensor_table import Layout, Piece
from .arena import View

if TYPE_CHECKING:
    from torch import Tensor

    Leaf: TypeAlias = Tensor | np.ndarray[Any, Any]

Bytes: TypeAlias = NDArray[np.uint8]
_LARGE_BYTES = 32 << 20
"""From here on it is worth it to copy with several threads."""
_HOW = attrgetter("layout", "is_meta", "is_quantized", "is_nested")
_OF_TENSOR, _OF_ARRAY = attrgetter("dtype", "shape", "layout", "device"), attrgetter("dtype", "shape")
"""What may change about a live tensor that is still the same object, and an array: with it, the layout does."""


class Stager:
    """Copies states into slots; remembers how the last state was made and laid out, and where each slot's pieces lie, until one is made
    otherwise."""

    def __init__(self) -> None:
        self._form: Form | None = None
        self._described: list[tuple[Any, ...]] = []
        self._layout = tensor_table.lay_out([])
        self._pieces_json = ""
        self._order: list[int] = []
        self._runs: dict[int, tuple[memoryview, list[list[Bytes]]]] = {}

    def plan(
        self,
        state: Any,
        is_leaf: Callable[[Any], bool],
        parts: Callable[[], Mapping[str, Sequence[Part]]] = dict,
        trained: Callable[[], Collection[str]] = frozenset,
    ) -> tuple[Layout, bytes, list[Leaf]]:
        """Where each leaf will lie, its table in JSON, and the leaves in that order.

        When the layout has changed, `parts` is asked for their places in global tensors, and `trained` for the names of the parameters that
        optimizers have. Raises SnapshotError for what `refuse` and `pytree_walk.Form` refuse."""
        walk = Walk(state)
        form = self._form if self._form is not None and self._form.fits(walk) else Form(walk, is_leaf)
        described = [_OF_ARRAY(leaf) if type(leaf) is np.ndarray else _OF_TENSOR(leaf) for leaf in walk.leaves]
        if form is not self._form or described != self._described:
            leaves, places = list(zip(form.names, walk.leaves, strict=True)), parts()
            ordered = order(leaves, places)
            self._layout, self._runs = lay_out([leaves[index] for index in ordered], places, trained()), {}
            self._form, self._described, self._order = form, described, ordered
            self._pieces_json = tensor_table.pieces_json(self._layout.pieces)
        encoded = tensor_table.encoded(form.skeleton(walk.values), self._pieces_json, self._layout.payload_bytes)
        return self._layout, encoded, [walk.leaves[index] for index in self._order]

    def stage(self, leaves: Sequence[Leaf], layout: Layout, view: View, only: Sequence[int] | None = None) -> None:
        """Copy the leaves (`only` these, by index), one for each piece of `layout`, with their fingerprints into the slot: any strides, any
        device. Complete on return."""
        import torch

        runs = self.runs(layout, view.memory)
        indexes = range(len(leaves)) if only is None else only
        scalars = _scalars(leaves, indexes)
        for alike in scalars:
            contents = _together([leaves[index] for index in alike])
            for index, content in zip(alike, contents, strict=True):
                runs[index][0][:] = content[: layout.pieces[index].nbytes]
            view.fingerprints[alike] = contents.view("<u8")[:, 0]
        done = {index for alike in scalars for index in alike}
        indexes = [index for index in indexes if index not in done]
        flats = [
            flat(leaf if isinstance(leaf, torch.Tensor) else torch.from_numpy(np.array(leaf)))
            for leaf in (leaves[index] for index in indexes)
        ]
        sources = list(map(lying, flats))  # as long as `flats` are there
        copies: list[tuple[Bytes, Bytes, int]] = []
        owners: list[int] = []
        for index, source in zip(indexes, sources, strict=True):
            at = 0
            for run in runs[index]:
                copies.append((run, source[at : at + len(run)], at))
                owners.append(index)
                at += len(run)
        view.fingerprints[indexes] = 0
        for index, word in zip(owners, _copy(copies, torch.get_num_threads()), strict=True):
            view.fingerprints[index] ^= np.uint64(word)

    def runs(self, layout: Layout, memory: memoryview) -> list[list[Bytes]]:
        """For each piece the runs of `memory` that hold it."""
        known = self._runs.get(id(memory))  # the view is kept along with its id, so the id can't come to mean another
        if known is None:
            zero_gaps(layout, memory)
            known = self._runs[id(memory)] = memory, [_runs(layout.image, piece, memory) for piece in layout.pieces]
        return known[1]


def _scalars(leaves: Sequence[Leaf], indexes: Sequence[int]) -> list[list[int]]:
    """Those of the leaves `indexes` that are one number on the CPU, by type: torch's Adam counts its steps in one a parameter, and each by
    itself takes longer than it takes to launch the copy of a large tensor."""
    import torch

    found: dict[torch.dtype, list[int]] = {}
    for index in indexes:
        leaf: Any = leaves[index]
        if type(leaf) is torch.Tensor and not leaf.ndim and leaf.is_cpu and leaf.itemsize <= fingerprint.WORD_BYTES:
            found.setdefault(leaf.dtype, []).append(index)
    return list(found.values())


def _together(numbers: Sequence[Any]) -> NDArray[np.uint8]:
    """The bytes of each, filled up to those of a word, which is its fingerprint."""
    import torch

    with torch.no_grad():
        values = torch.stack(tuple(numbers)).reshape(-1, 1).view(torch.uint8).numpy()
    words = np.zeros((len(numbers), fingerprint.WORD_BYTES), np.uint8)
    words[:, : values.shape[1]] = values
    return words


def lay_out(
    leaves: Sequence[tuple[str, Leaf]],
    parts: Mapping[str, Sequence[Part]] = MappingProxyType({}),
    trained: Collection[str] = (),
) -> Layout:
    """Where these leaves will lie, in this order. Raises SnapshotError for one that has no plain bytes."""
    for name, leaf in leaves:
        if not (isinstance(leaf, np.ndarray) or leaf.is_meta):  # a layout can be planned without any memory
            refuse(f"tensor {name!r}", leaf)
    dtypes = {each: str(each).removeprefix("torch.") for each in {leaf.dtype for _, leaf in leaves}}
    described = ((name, dtypes[leaf.dtype], tuple(leaf.shape)) for name, leaf in leaves)
    return tensor_table.lay_out(described, parts, trained)


def refuse(called: str, tensor: Tensor) -> None:
    """Raises SnapshotError for a tensor that has no plain bytes: which one, of which type, and what to do. called: its name in that."""
    import torch

    layout, meta, quantized, nested = _HOW(tensor)
    if meta:
        raise refusal(called, tensor, "is on the meta device. Give it memory (to_empty) before the Session")
    if nested or quantized or layout is not torch.strided:
        what = f"is {tensor.dtype}, quantized" if quantized else f"is not dense ({layout})"
        what = "is a nested tensor" if nested else what
        raise refusal(called, tensor, f"{what}. Keep a dense tensor of plain numbers in its place")


def refusal(called: str, tensor: Tensor, why: str) -> SnapshotError:
    kind = type(tensor)
    return SnapshotError(f"{called}, a {kind.__module__}.{kind.__qualname__}, can't be saved: it {why}")


def order(leaves: Sequence[tuple[str, Leaf]], parts: Mapping[str, Sequence[Part]]) -> list[int]:
    """The leaves' indexes so that replicas have as much as possible in the same place: first what is not cut at all, then what is, then
    the flat shards of a distributed optimizer, then what no one else has; each with the large ones first."""

    def rank(index: int) -> tuple[int, int, str]:
        name, leaf = leaves[index]
        places = parts.get(name, ())
        return sharding.cutting(places), -math.prod(leaf.shape), places[0].name if places else name

    return sorted(range(len(leaves)), key=rank)


def _copy(copies: Sequence[tuple[Bytes, Bytes, int]], threads: int) -> list[int]:
    """What each part of a source, so many bytes from its start, gives to its fingerprint: looked at while it is in the cache.

    Not by torch: the threads of its copies spin while they wait for each other, and cores are scarce beside a training (facts)."""

    def copy(to: Bytes, content: Bytes, at: int) -> int:
        np.copyto(to, content)
        return fingerprint.of_part(content.data, at)

    if threads == 1 or sum(len(run) for run, _, _ in copies) < _LARGE_BYTES:
        return [copy(*each) for each in copies]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(copy, *zip(*copies, strict=True), chunksize=max(1, len(copies) // (8 * threads))))


def flat(tensor: Tensor) -> Tensor:
    """The bytes of `tensor`, row-major, in one dimension: its own memory where it lies so, a copy otherwise."""
    import torch

    row = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if row.stride() != (1,):  # one element alone, cut out of a matrix: contiguous all the same
        row = row.as_strided(row.shape, (1,))
    return row.view(torch.uint8)


def lying(content: Tensor) -> Bytes:
    """The bytes of a `flat` tensor where they lie, as long as it is there. `numpy()` would forbid its script to resize it from then on."""
    if not content.is_cpu:
        return content.numpy(force=True)
    if not content.numel():
        return np.zeros(0, np.uint8)
    return np.frombuffer((ctypes.c_ubyte * content.numel()).from_address(content.data_ptr()), np.uint8)


def _runs(image: Image, piece: Piece, memory: memoryview) -> list[Bytes]:
    whole = np.frombuffer(memory, np.uint8)
    places = ((chunk * image.stride_bytes + at, run) for chunk, at, run in image.segments(piece.offset, piece.nbytes))
    return [whole[at : at + run] for at, run in places]


def zero_gaps(layout: Layout, memory: memoryview) -> None:
    """Make the payload's bytes depend on nothing but the state, whatever the slot held before."""
    image, end = layout.image, 0
    for offset, nbytes in [*((piece.offset, piece.nbytes) for piece in layout.pieces), (layout.payload_bytes, 0)]:
        for chunk, at, run in image.segments(end, offset - end):
            place = chunk * image.stride_bytes + at
            memory[place : place + run] = bytes(run)
        end = offset + nbytes
