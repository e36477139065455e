"""The table of a slot or slab: which tensors it contains, and where. Pure.

plan (names, dtypes, shapes) → `Layout` → with the skeleton as JSON beside the payload → `Table`, accepted only if every number is valid.
Offsets are relative to the payload. `shard_image.py` maps a byte of the payload to memory and disk.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from msgspec.structs import asdict

from ...resilience.errors import SnapshotError
from .pytree import Json, unflatten
from .schema import MOST_AXES, MOST_ELEMENTS, MOST_NAME, PartForm, PieceForm, TableForm, checked, parse
from .shard_image import CHUNK_BYTES, Image, padded
from .sharding import Part

ALIGN_BYTES = 64
"""Alignment of each tensor in bytes: a cache line, and more than any dtype needs."""

_WHOLE = Image(CHUNK_BYTES)
"""Used to align offsets: all payloads of whole chunks align in the same way, and a smaller payload aligns like the first chunk."""

ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}
"""The dtypes that a snapshot can contain, by torch's names, and the bytes per element."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One tensor: `nbytes` bytes of the payload from `offset` on, row-major, little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    parts: tuple[Part, ...] = ()
    """The parts of global tensors that it contains; empty if unknown."""
    trained: bool = False
    """Whether an optimizer names it as one of its parameters. Set only if no parts are known."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the tensors' bytes lie. `payload_bytes` is padded to whole chunks; gaps and padding are zero."""

    pieces: tuple[Piece, ...]
    payload_bytes: int

    @cached_property
    def image(self) -> Image:
        return Image(self.payload_bytes)

    def by_chunk(self) -> dict[int, list[tuple[int, int, int, int]]]:
        """Return the contents of each chunk, piece by piece: (number of the piece, first byte in the piece, offset in the chunk, bytes)."""
        found: dict[int, list[tuple[int, int, int, int]]] = {}
        for number, piece in enumerate(self.pieces):
            done = 0
            for chunk, at, run in self.image.segments(piece.offset, piece.nbytes):
                found.setdefault(chunk, []).append((number, done, at, run))
                done += run
        return found


@dataclass(frozen=True, kw_only=True)
class Table(Layout):
    """Everything about a state except its tensors' bytes."""

    skeleton: Json

    def described(self) -> Any:
        """Return the state, with a piece in place of each tensor and array."""
        return unflatten(self.skeleton, {piece.name: piece for piece in self.pieces}, array=lambda piece: piece)

    def as_object(self) -> Json:
        return {"skeleton": self.skeleton, "pieces": _rows(self.pieces), "payload_bytes": self.payload_bytes}

    @classmethod
    def from_object(cls, found: Json) -> Table:
        """Return the table in a parsed JSON value. Raises SnapshotError unless every piece fits into the payload."""
        return cls.of_form(checked(found, TableForm, "the tensor table"))

    @classmethod
    def of_form(cls, form: TableForm) -> Table:
        total = form.payload_bytes
        if padded(total) != total:
            raise SnapshotError(f"the tensor table's payload of {total} bytes is not a whole number of chunks")
        pieces = tuple(map(_piece, form.pieces))
        end, names = 0, set()
        for piece in pieces:
            aligned = Image(total).aligned(piece.offset, ALIGN_BYTES) == piece.offset
            if piece.offset < end or not aligned or piece.offset + piece.nbytes > total:
                raise SnapshotError(
                    f"tensor {piece.name!r} lies outside the payload, over another tensor, or unaligned"
                )
            if piece.name in names:
                raise SnapshotError(f"the tensor table names {piece.name!r} twice")
            names.add(piece.name)
            end = piece.offset + piece.nbytes
        return cls(skeleton=form.skeleton, pieces=pieces, payload_bytes=total)

    def to_json(self) -> bytes:
        return encoded(json.dumps(self.skeleton, separators=(",", ":")), pieces_json(self.pieces), self.payload_bytes)

    @classmethod
    def from_json(cls, data: bytes) -> Table:
        """Return the table in `data`. Raises SnapshotError for invalid data."""
        return cls.from_object(parse(data, "the tensor table"))

    @classmethod
    def of(cls, layout: Layout, data: bytes) -> Table:
        """Return the table in `data`. This process wrote `data` for a state with the layout `layout`."""
        return cls(pieces=layout.pieces, payload_bytes=layout.payload_bytes, skeleton=json.loads(data)["skeleton"])


def plan(
    skeleton: Json,
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    parts: Mapping[str, Sequence[Part]] = MappingProxyType({}),
    trained: Collection[str] = (),
) -> Table:
    """Return the table of a state with this skeleton, laid out by `lay_out`."""
    layout = lay_out(tensors, parts, trained)
    return Table(skeleton=skeleton, pieces=layout.pieces, payload_bytes=layout.payload_bytes)


def lay_out(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    parts: Mapping[str, Sequence[Part]] = MappingProxyType({}),
    trained: Collection[str] = (),
) -> Layout:
    """Lay out tensors, given as (name, dtype, shape), in the given order. parts: the known parts, by tensor name. trained: names of
    optimizers' parameters. Raises SnapshotError for an unknown dtype, for too many axes, and for too long a name."""
    pieces: list[Piece] = []
    end = 0
    for name, dtype, shape in tensors:
        if dtype not in ITEM_BYTES:
            raise SnapshotError(f"tensor {name!r} has the dtype {dtype}, which can't be saved")
        if len(shape) > MOST_AXES or len(name) > MOST_NAME:
            raise SnapshotError(
                f"tensor {name[:200]!r} has {len(shape)} axes and a name of {len(name)} letters; up to {MOST_AXES} and {MOST_NAME} can be "
                "saved"
            )
        offset = _WHOLE.aligned(end, ALIGN_BYTES)
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        known = tuple(parts.get(name, ()))
        pieces.append(
            Piece(
                name=name,
                dtype=dtype,
                shape=shape,
                offset=offset,
                nbytes=nbytes,
                parts=known,
                trained=not known and name in trained,
            )
        )
        end = offset + nbytes
    return Layout(pieces=tuple(pieces), payload_bytes=padded(max(end, 1)))


def encoded(skeleton: str, pieces: str, payload_bytes: int) -> bytes:
    """Return a table's JSON. `skeleton` and `pieces` are JSON already."""
    return f'{{"skeleton":{skeleton},"pieces":{pieces},"payload_bytes":{payload_bytes}}}'.encode()


def pieces_json(pieces: Sequence[Piece]) -> str:
    return json.dumps(_rows(pieces), separators=(",", ":"))


def _rows(pieces: Sequence[Piece]) -> list[Json]:
    return [
        [
            each.name,
            each.dtype,
            list(each.shape),
            each.offset,
            *([[part_row(part) for part in each.parts]] if each.parts or each.trained else []),
            *([True] if each.trained else []),
        ]
        for each in pieces
    ]


def part_row(part: Part) -> Json:
    return [
        part.name,
        list(part.shape),
        list(part.offset),
        list(part.box),
        None if part.flat is None else list(part.flat),
        list(part.replica),
        part.start,
        None if part.strides is None else list(part.strides),
        part.stacked,
        part.padded,
    ]


def _piece(form: PieceForm) -> Piece:
    elements = math.prod(form.shape)
    if form.dtype not in ITEM_BYTES or math.prod(max(size, 1) for size in form.shape) >= MOST_ELEMENTS:
        raise SnapshotError(f"the tensor table has a malformed row {str(asdict(form))[:200]}")
    return Piece(
        name=form.name,
        dtype=form.dtype,
        shape=form.shape,
        offset=form.offset,
        nbytes=elements * ITEM_BYTES[form.dtype],
        parts=tuple(_part(part, elements) for part in form.parts),
        trained=form.trained,
    )


def _part(form: PartForm, elements: int) -> Part:
    """Return a part of a tensor that has `elements` elements. Raises SnapshotError unless the whole part lies within the tensor."""
    shape, offset, box, flat, strides = form.shape, form.offset, form.box, form.flat, form.strides
    if (
        len(shape) == len(offset) == len(box) >= form.stacked
        and all(at + size <= whole for at, size, whole in zip(offset, box, shape, strict=True))
        and math.prod(max(size, 1) for size in shape) < MOST_ELEMENTS
        and (flat is None or (flat[0] <= flat[1] <= math.prod(box) and strides is None))
        and (strides is None or len(strides) == len(box))
    ):
        part = Part(**asdict(form))
        if not part.elements or part.last < elements:
            return part
    raise SnapshotError(f"the tensor table has a malformed part {str(asdict(form))[:200]}")
