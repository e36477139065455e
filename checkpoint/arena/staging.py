"""Copies tensors into a slot's image: `Stager.stage` copies the training state into the slot; `fill.py` copies it back.

In checkpoint/, only these two modules and `format/fingerprint.py` handle tensors. These three modules import torch when the first tensor
arrives.
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
"""The least number of bytes for which copying with several threads is faster."""
_HOW = attrgetter("layout", "is_meta", "is_quantized", "is_nested")
_OF_TENSOR, _OF_ARRAY = attrgetter("dtype", "shape", "layout", "device"), attrgetter("dtype", "shape")
"""Properties that may change while a live tensor or array remains the same object. If one changes, the layout changes."""


class Stager:
    """Copies states into slots. A Stager caches the last state's structure and layout, and where each slot's pieces lie, until a state has
    another structure or layout."""

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
        """Return where each leaf (tensor or array) will lie, the table in JSON, and the leaves in that order.

        If the layout has changed, this calls `parts` for the leaves' positions in global tensors, and `trained` for the names of
        optimizers' parameters. Raises SnapshotError for values that `refuse` or `pytree_walk.Form` rejects."""
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
        """Copy the leaves, one for each piece of `layout`, into the slot with their fingerprints. Leaves may have any strides and be on any
        device. only: the indexes of the leaves to copy. The copy is complete on return."""
        import torch

        runs = self.runs(layout, view.memory)
        indexes = range(len(leaves)) if only is None else only
        scalars = _scalars(leaves, indexes)
        for alike in scalars:
            contents = _together([leaves[index] for index in alike])
            for index, content in zip(alike, contents, strict=True):
                runs[index][0][:] = content[: len(runs[index][0])]
            view.fingerprints[alike] = contents.view("<u8")[:, 0]
        done = {index for alike in scalars for index in alike}
        indexes = [index for index in indexes if index not in done]
        flats = [
            flat(leaf if isinstance(leaf, torch.Tensor) else torch.from_numpy(np.array(leaf)))
            for leaf in (leaves[index] for index in indexes)
        ]
        sources = list(map(lying, flats))  # valid while the tensors in `flats` exist
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
        """Return, for each piece, the runs of `memory` (contiguous ranges of bytes) that contain the piece."""
        known = self._runs.get(id(memory))  # the view is kept along with its id, so no other view can get that id
        if known is None:
            zero_gaps(layout, memory)
            known = self._runs[id(memory)] = memory, [runs_of(layout.image, piece, memory) for piece in layout.pieces]
        return known[1]


def _scalars(leaves: Sequence[Leaf], indexes: Sequence[int]) -> list[list[int]]:
    """Return the indexes, among `indexes`, of leaves that are a single number on the CPU, grouped by dtype. torch's Adam keeps such a step
    count for each parameter. Copying one number alone takes longer than launching the copy of a large tensor."""
    import torch

    found: dict[torch.dtype, list[int]] = {}
    for index in indexes:
        leaf: Any = leaves[index]
        if type(leaf) is torch.Tensor and not leaf.ndim and leaf.is_cpu and leaf.itemsize <= fingerprint.WORD_BYTES:
            found.setdefault(leaf.dtype, []).append(index)
    return list(found.values())


def _together(numbers: Sequence[Any]) -> NDArray[np.uint8]:
    """Return the bytes of each number, padded with zeros to a word, which is also the number's fingerprint."""
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
    """Return where these leaves will lie, in the given order. Raises SnapshotError for a leaf without plain bytes."""
    for name, leaf in leaves:
        if not (isinstance(leaf, np.ndarray) or leaf.is_meta):  # a meta tensor is accepted: planning needs no memory
            refuse(f"tensor {name!r}", leaf)
    dtypes = {each: str(each).removeprefix("torch.") for each in {leaf.dtype for _, leaf in leaves}}
    described = ((name, dtypes[leaf.dtype], tuple(leaf.shape)) for name, leaf in leaves)
    return tensor_table.lay_out(described, parts, trained)


def refuse(called: str, tensor: Tensor) -> None:
    """Raise SnapshotError for a tensor without plain bytes. The message names the tensor and its type, and says what to do. called: the
    tensor's name in the message."""
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
    """Return the leaves' indexes, sorted so that replicas have as much data as possible at the same offsets. The order: tensors that are
    not split over ranks, tensors that are split into boxes, the flat shards of a distributed optimizer, tensors that no other rank has.
    Within each group, larger tensors come first."""

    def rank(index: int) -> tuple[int, int, str]:
        name, leaf = leaves[index]
        places = parts.get(name, ())
        return sharding.cutting(places), -math.prod(leaf.shape), places[0].name if places else name

    return sorted(range(len(leaves)), key=rank)


def _copy(copies: Sequence[tuple[Bytes, Bytes, int]], threads: int) -> list[int]:
    """Copy each part of a source tensor. Return what each part contributes to its tensor's fingerprint, computed while the part is in the
    cache. The last number in each entry of `copies` is the part's offset in bytes from the source's start.

    torch is not used for this copy, because its copying threads poll while they wait for each other, and cores are scarce during
    training."""

    def copy(to: Bytes, content: Bytes, at: int) -> int:
        np.copyto(to, content)
        return fingerprint.of_part(content.data, at)

    if threads == 1 or sum(len(run) for run, _, _ in copies) < _LARGE_BYTES:
        return [copy(*each) for each in copies]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(copy, *zip(*copies, strict=True), chunksize=max(1, len(copies) // (8 * threads))))


def flat(tensor: Tensor) -> Tensor:
    """Return the bytes of `tensor`, row-major, in one dimension. If the tensor is contiguous, they are its own memory, and otherwise a
    copy."""
    import torch

    row = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if row.stride() != (1,):  # one element of a matrix: torch calls it contiguous although its stride is not 1
        row = row.as_strided(row.shape, (1,))
    return row.view(torch.uint8)


def lying(content: Tensor) -> Bytes:
    """Return the bytes of a `flat` tensor without a copy, valid only while the tensor exists. (After `numpy()`, the script could no longer
    resize its tensor.)"""
    if not content.is_cpu:
        return content.cpu().numpy()
    if not content.numel():
        return np.zeros(0, np.uint8)
    return np.frombuffer((ctypes.c_ubyte * content.numel()).from_address(content.data_ptr()), np.uint8)


def runs_of(image: Image, piece: Piece, memory: memoryview) -> list[Bytes]:
    """Return the runs of `memory` (contiguous ranges of bytes) that contain the piece."""
    whole = np.frombuffer(memory, np.uint8)
    places = ((chunk * image.stride_bytes + at, run) for chunk, at, run in image.segments(piece.offset, piece.nbytes))
    return [whole[at : at + run] for at, run in places]


def zero_gaps(layout: Layout, memory: memoryview) -> None:
    """Zero the gaps between pieces, so that the payload depends only on the state, not on the slot's old content."""
    image, end = layout.image, 0
    for offset, nbytes in [*((piece.offset, piece.nbytes) for piece in layout.pieces), (layout.payload_bytes, 0)]:
        for chunk, at, run in image.segments(end, offset - end):
            place = chunk * image.stride_bytes + at
            memory[place : place + run] = bytes(run)
        end = offset + nbytes
