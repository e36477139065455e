"""Reads boxes of global tensors (tensors that are split over ranks) from a snapshot of any layout. Reads only the chunks that contain them.

manifests of all ranks → boxes by global name → their overlap with each wanted box → chunks of each slab, in file order → copies.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...resilience.errors import LayoutError, SnapshotError
from ..arena.memory_limits import room
from ..backend.place import Place
from ..format import fingerprint
from ..format.manifest import RankManifest
from ..format.sharding import Overlap, Part, Shape, boxes, covers, overlap
from ..format.tensor_table import ITEM_BYTES, Piece
from . import load

_MOST_RUNS = 1 << 16
"""The most runs (contiguous ranges of bytes) that are read separately for one box. With more, all bytes from the first run to the last are
read."""


@dataclass(frozen=True)
class Box:
    """A box of a global tensor, as a rank has saved it."""

    rank: int
    piece: int
    part: Part


@dataclass(frozen=True)
class Wanted:
    """A tensor to fill: its elements in one dimension, as words of an element's size, and the parts of global tensors that they
    represent."""

    where: str
    """The name for error messages."""
    dtype: str
    parts: Sequence[Part]
    memory: NDArray[np.generic]


@dataclass(frozen=True)
class _Copy:
    wanted: Wanted
    box: Overlap


class Saved:
    """A snapshot, opened with the manifests of all ranks."""

    def __init__(self, snapshot: Place, proving: bool = False) -> None:
        """proving: verify the fingerprint of each whole piece once, before any of it is used. (A restore does not do this: it reads no more
        than it needs.)

        Raises SnapshotError, MachineError or OSError as `load.open_rank` does."""
        self.snapshot = snapshot
        self.manifests = load.open_ranks(snapshot)
        self.boxes: dict[str, list[Box]] = defaultdict(list)
        """The saved boxes by global name. A box that several ranks have saved is listed once."""
        self.shapes: dict[str, tuple[str, Shape]] = {}
        """Dtype and shape by global name."""
        self._proved: set[tuple[int, int]] | None = set() if proving else None
        for rank, manifest in enumerate(self.manifests):
            for number, piece in enumerate(manifest.table.pieces):
                for part in piece.parts:
                    if part.is_main:
                        self.boxes[part.name] += [Box(rank, number, each) for each in boxes(part)]
                        self.shapes.setdefault(part.name, (piece.dtype, part.shape))

    @cached_property
    def described(self) -> list[Any]:
        """The state of each rank, with a piece (a tensor's table entry) in place of each tensor."""
        return [manifest.table.described() for manifest in self.manifests]

    def piece(self, box: Box) -> Piece:
        return self.manifests[box.rank].table.pieces[box.piece]

    def whole(self, name: str) -> NDArray[np.generic]:
        """Return the elements of a global tensor, row-major, as words of an element's size."""
        dtype, shape = self.shapes[name]
        memory = words(dtype, shape, name)
        self.fill([Wanted(name, dtype, [Part(name=name, shape=shape, offset=(0,) * len(shape), box=shape)], memory)])
        return memory

    def digest(self) -> str:
        """Return SHA-256, in hex, of all global tensors: name, dtype, shape, elements. The digest is the same in every parallel layout,
        unless a tensor is padded."""
        total = sha256()
        for name in sorted(name for name, held in self.boxes.items() if held):  # a tensor without elements has no boxes
            dtype, shape = self.shapes[name]
            total.update(json.dumps([name, dtype, shape]).encode())
            total.update(self.whole(name).data)
        return total.hexdigest()

    def content(self, rank: int, piece: Piece) -> NDArray[np.uint8]:
        """Return the bytes of a piece that only one rank has saved."""
        manifest, buffer = self.manifests[rank], room(piece.nbytes, piece.name)
        for done, content in self._runs(manifest, piece):
            buffer[done : done + len(content)] = np.frombuffer(content, np.uint8)
        load.check_word(self.snapshot, manifest, manifest.table.pieces.index(piece), fingerprint.of_bytes(buffer.data))
        return buffer

    def _prove(self, manifest: RankManifest, number: int) -> None:
        """Read the whole piece, unless it was verified before. Raises SnapshotError if its fingerprint differs."""
        if self._proved is None or (manifest.rank, number) in self._proved:
            return
        found = 0
        for done, content in self._runs(manifest, manifest.table.pieces[number]):
            found ^= fingerprint.of_part(content, done)
        load.check_word(self.snapshot, manifest, number, found)
        self._proved.add((manifest.rank, number))

    def _runs(self, manifest: RankManifest, piece: Piece) -> Iterator[tuple[int, memoryview]]:
        """Yield a piece's bytes in runs: (offset in the piece, bytes)."""
        segments, done = list(manifest.table.image.segments(piece.offset, piece.nbytes)), 0
        read = load.chunks(self.snapshot, manifest, [index for index, _, _ in segments])
        for (_, at, run), (_, chunk) in zip(segments, read, strict=False):
            yield done, chunk[at : at + run]
            done += run

    def fill(self, wanted: Sequence[Wanted]) -> None:
        """Fill all tensors of `wanted`. Raises LayoutError, before anything is read, if the snapshot lacks some of their elements."""
        copies: dict[int, dict[int, list[_Copy]]] = defaultdict(lambda: defaultdict(list))
        for each in wanted:
            for part in each.parts:
                for box in boxes(part):
                    self._find(each, box, copies)
        for rank, by_piece in copies.items():
            self._read(self.manifests[rank], by_piece)

    def _find(self, wanted: Wanted, part: Part, copies: dict[int, dict[int, list[_Copy]]]) -> None:
        """Record in `copies` from which saved boxes the elements of one wanted box are copied."""
        found, places = 0, []
        for box in self.boxes.get(part.name, ()):
            dtype, shape = self.piece(box).dtype, box.part.shape
            padded = part.padded and box.part.padded and shape[1:] == part.shape[1:]
            if dtype != wanted.dtype or (shape != part.shape and not padded):
                raise LayoutError(
                    f"{wanted.where}: the snapshot holds {part.name} as {dtype} {shape}, and this run wants {wanted.dtype} {part.shape}"
                )
            common = overlap(box.part, part)
            if common is not None:
                copies[box.rank][box.piece].append(_Copy(wanted, common))
                found += math.prod(common.box)
                places.append((common.offset, common.box))
        if found == math.prod(part.box):
            if not covers(places, part.offset, part.box):
                raise SnapshotError(
                    f"{self.snapshot}: it holds some elements of {part.name} twice, and others not; it is damaged"
                )
            return
        if not part.padded:
            raise LayoutError(
                f"{wanted.where}: the snapshot holds {found} of the {math.prod(part.box)} elements of {part.name} {part.box} at "
                f"{part.offset}"
            )
        _view(wanted.memory, part.start, part.box, part.strides or ())[...] = (
            0  # padding rows that only this run's layout has
        )

    def _read(self, manifest: RankManifest, by_piece: Mapping[int, Sequence[_Copy]]) -> None:
        table = manifest.table
        segments: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
        missing: dict[int, set[int]] = {}
        for number, copies in by_piece.items():
            self._prove(manifest, number)
            piece = table.pieces[number]
            runs = [run for copy in copies for run in _runs(copy.box, ITEM_BYTES[piece.dtype])]
            needed = {
                chunk for first, end in runs for chunk, _, _ in table.image.segments(piece.offset + first, end - first)
            }
            missing[number], done = needed, 0
            for index, at, run in table.image.segments(piece.offset, piece.nbytes):
                if index in needed:
                    segments[index].append((number, done, at, run))
                done += run
        whole = {
            number: len(chunks)
            == len(list(table.image.segments(table.pieces[number].offset, table.pieces[number].nbytes)))
            for number, chunks in missing.items()
        }
        held: dict[int, NDArray[np.uint8]] = {}
        for index, chunk in load.chunks(self.snapshot, manifest, sorted(segments)):
            content = np.frombuffer(chunk, np.uint8)
            for number, done, at, run in segments[index]:
                if number not in held:
                    held[number] = room(table.pieces[number].nbytes, table.pieces[number].name)
                held[number][done : done + run] = content[at : at + run]
                missing[number].discard(index)
                if not missing[number]:
                    buffer = held.pop(number)
                    if whole[number]:
                        load.check_word(self.snapshot, manifest, number, fingerprint.of_bytes(buffer.data))
                    _carry_out(by_piece[number], buffer.view(word(table.pieces[number].dtype)))


def word(dtype: str) -> np.dtype[np.generic]:
    """Return a numpy type with the size of an element. Bits are only moved here, never interpreted."""
    size = ITEM_BYTES[dtype]
    return np.dtype(f"u{size}" if size <= 8 else f"V{size}")


def words(dtype: str, shape: Shape, what: str) -> NDArray[np.generic]:
    """Return zeros for all elements, as words of an element's size. Raises MachineError if there is not enough memory."""
    return room(math.prod(shape) * ITEM_BYTES[dtype], what).view(word(dtype))


def _carry_out(copies: Sequence[_Copy], source: NDArray[np.generic]) -> None:
    for copy in copies:
        box = copy.box
        target = _view(copy.wanted.memory, box.target, box.box, box.target_strides)
        target[...] = _view(source, box.source, box.box, box.source_strides)


def _view(memory: NDArray[np.generic], start: int, shape: Shape, strides: Shape) -> NDArray[np.generic]:
    steps = [stride * memory.itemsize if size > 1 else 0 for size, stride in zip(shape, strides, strict=True)]
    return np.lib.stride_tricks.as_strided(memory[start:], shape, steps)


def _runs(box: Overlap, item_bytes: int) -> list[tuple[int, int]]:
    """Return the byte ranges [first, end) of the source that a box needs. Adjacent bytes form one range."""
    axes = [(size, stride) for size, stride in zip(box.box, box.source_strides, strict=True) if size > 1]
    length = 1
    while axes and axes[-1][1] == length:
        length *= axes.pop()[0]
    last = box.source + sum((size - 1) * stride for size, stride in axes) + length
    if math.prod(size for size, _ in axes) > _MOST_RUNS:
        return [(box.source * item_bytes, last * item_bytes)]
    starts = np.array([box.source])
    for size, stride in axes:
        starts = np.add.outer(starts, np.arange(size) * stride).ravel()
    return [(int(start) * item_bytes, (int(start) + length) * item_bytes) for start in starts]
