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
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import asdict, astuple

from ...resilience.errors import SnapshotError
from .pytree import Json, unflatten
from .schema import MOST_AXES, MOST_ELEMENTS, MOST_NAME, Axes, Name, Size, checked, parse
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


class Piece(Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """One tensor: `nbytes` bytes of the payload from `offset` on, row-major, little-endian. In a table it is a JSON array of its fields, in
    this order, without the last ones if they have their defaults."""

    name: Name
    dtype: str
    shape: Axes
    offset: Size
    parts: tuple[Part, ...] = ()
    """The parts of global tensors that it contains; empty if unknown."""
    trained: bool = False
    """Whether an optimizer names it as one of its parameters. Set only if no parts are known."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


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


class TableForm(Struct, forbid_unknown_fields=True):
    """The JSON of a table."""

    skeleton: Any
    pieces: tuple[Piece, ...]
    payload_bytes: Annotated[int, Meta(ge=1, lt=1 << 60)]


@dataclass(frozen=True, kw_only=True)
class Table(Layout):
    """Everything about a state except its tensors' bytes."""

    skeleton: Json

    def described(self) -> Any:
        """Return the state, with a piece in place of each tensor and array."""
        return unflatten(self.skeleton, {piece.name: piece for piece in self.pieces}, array=lambda piece: piece)

    def as_object(self) -> Json:
        return {"skeleton": self.skeleton, "pieces": list(map(_row, self.pieces)), "payload_bytes": self.payload_bytes}

    @classmethod
    def of_form(cls, form: TableForm) -> Table:
        """Return the table. Raises SnapshotError unless every piece fits into the payload."""
        total = form.payload_bytes
        if padded(total) != total:
            raise SnapshotError(f"the tensor table's payload of {total} bytes is not a whole number of chunks")
        end, names = 0, set()
        for piece in form.pieces:
            if piece.dtype not in ITEM_BYTES or math.prod(max(size, 1) for size in piece.shape) >= MOST_ELEMENTS:
                raise SnapshotError(f"the tensor table has a malformed row {str(asdict(piece))[:200]}")
            for part in piece.parts:
                if not _fits(part, math.prod(piece.shape)):
                    raise SnapshotError(f"the tensor table has a malformed part {str(asdict(part))[:200]}")
            aligned = Image(total).aligned(piece.offset, ALIGN_BYTES) == piece.offset
            if piece.offset < end or not aligned or piece.offset + piece.nbytes > total:
                raise SnapshotError(
                    f"tensor {piece.name!r} lies outside the payload, over another tensor, or unaligned"
                )
            if piece.name in names:
                raise SnapshotError(f"the tensor table names {piece.name!r} twice")
            names.add(piece.name)
            end = piece.offset + piece.nbytes
        return cls(skeleton=form.skeleton, pieces=form.pieces, payload_bytes=total)

    def to_json(self) -> bytes:
        return encoded(json.dumps(self.skeleton, separators=(",", ":")), pieces_json(self.pieces), self.payload_bytes)

    @classmethod
    def from_json(cls, data: bytes) -> Table:
        """Return the table in `data`. Raises SnapshotError for invalid data."""
        return cls.of_form(checked(parse(data, "the tensor table"), TableForm, "the tensor table"))

    @classmethod
    def of(cls, layout: Layout, data: bytes) -> Table:
        """Return the table in `data`, which this process itself wrote for a state with the layout `layout`."""
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
    optimizers' parameters. Raises SnapshotError if a dtype is unknown, if a tensor has too many axes, or if a name is too long."""
    pieces: list[Piece] = []
    end = 0
    for name, dtype, shape in tensors:
        if dtype not in ITEM_BYTES:
            raise SnapshotError(f"tensor {name!r} has the dtype {dtype}, which a snapshot cannot contain")
        if len(shape) > MOST_AXES or len(name) > MOST_NAME:
            raise SnapshotError(
                f"tensor {name[:200]!r} has {len(shape)} axes and a name of {len(name)} letters; up to {MOST_AXES} and {MOST_NAME} can be "
                "saved"
            )
        offset, known = _WHOLE.aligned(end, ALIGN_BYTES), tuple(parts.get(name, ()))
        alone = not known and name in trained
        pieces.append(Piece(name=name, dtype=dtype, shape=shape, offset=offset, parts=known, trained=alone))
        end = offset + pieces[-1].nbytes
    return Layout(pieces=tuple(pieces), payload_bytes=padded(max(end, 1)))


def encoded(skeleton: str, pieces: str, payload_bytes: int) -> bytes:
    """Return a table's JSON. `skeleton` and `pieces` are JSON already."""
    return f'{{"skeleton":{skeleton},"pieces":{pieces},"payload_bytes":{payload_bytes}}}'.encode()


def pieces_json(pieces: Sequence[Piece]) -> str:
    return json.dumps(list(map(_row, pieces)), separators=(",", ":"))


def _row(piece: Piece) -> Json:
    row = [piece.name, piece.dtype, piece.shape, piece.offset]
    if piece.parts or piece.trained:
        row.append([astuple(part) for part in piece.parts])
    if piece.trained:
        row.append(True)
    return row


def _fits(part: Part, elements: int) -> bool:
    """Return whether the whole part lies within its tensor, which has `elements` elements, and within its global tensor."""
    shape, flat, strides = part.shape, part.flat, part.strides
    return (
        len(shape) == len(part.offset) == len(part.box) >= part.stacked
        and all(at + size <= whole for at, size, whole in zip(part.offset, part.box, shape, strict=True))
        and math.prod(max(size, 1) for size in shape) < MOST_ELEMENTS
        and (flat is None or (flat[0] <= flat[1] <= math.prod(part.box) and strides is None))
        and (strides is None or len(strides) == len(part.box))
        and (not part.elements or part.last < elements)
    )
