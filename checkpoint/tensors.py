"""What tensors a slot or slab holds, and where: a table of pieces. Pure.

plan (names, dtypes, shapes) → `Layout` → with the skeleton as JSON beside the payload → `Table`, believed only if every number fits.
Offsets are those of the payload; where a byte of it lies in memory and on disk is `image.py`'s.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from ..resilience.errors import SnapshotError
from .geometry import Part
from .image import CHUNK_BYTES, Image, padded
from .tree import Json, unflatten

ALIGN_BYTES = 64
"""A cache line, and more than any dtype's alignment."""

_WHOLE = Image(CHUNK_BYTES)
"""Any payload of whole chunks aligns alike; one that is smaller, like the first chunk."""

ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}
"""The dtypes a snapshot can hold, by torch's names, and the bytes of an element."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One tensor: `nbytes` bytes from `offset` of the payload on, row-major, little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    parts: tuple[Part, ...] = ()
    """Where it lies in global tensors; empty where nobody knows."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the bytes lie. `payload_bytes` is padded to whole chunks, gaps and padding are zero."""

    pieces: tuple[Piece, ...]
    payload_bytes: int

    @cached_property
    def image(self) -> Image:
        return Image(self.payload_bytes)

    def by_chunk(self) -> dict[int, list[tuple[int, int, int, int]]]:
        """What each chunk holds: (number of the piece, from which of its bytes on, place in the chunk, bytes), piece by piece."""
        found: dict[int, list[tuple[int, int, int, int]]] = {}
        for number, piece in enumerate(self.pieces):
            done = 0
            for chunk, at, run in self.image.segments(piece.offset, piece.nbytes):
                found.setdefault(chunk, []).append((number, done, at, run))
                done += run
        return found


@dataclass(frozen=True, kw_only=True)
class Table(Layout):
    """Everything but the bytes."""

    skeleton: Json

    def described(self) -> Any:
        """The state, with a piece in the place of each tensor and array."""
        return unflatten(self.skeleton, {piece.name: piece for piece in self.pieces}, array=lambda piece: piece)

    def as_object(self) -> Json:
        return {"skeleton": self.skeleton, "pieces": _rows(self.pieces), "payload_bytes": self.payload_bytes}

    @classmethod
    def from_object(cls, found: Json) -> Table:
        """The table in a parsed JSON value. Raises SnapshotError unless every piece fits in."""
        table = strict(found, "the tensor table", skeleton=object, pieces=list, payload_bytes=int)
        total = table["payload_bytes"]
        if total < 1 or padded(total) != total:
            raise SnapshotError(f"the tensor table's payload of {total} bytes is not a whole number of chunks")
        pieces = tuple(_piece(row) for row in table["pieces"])
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
        return cls(skeleton=table["skeleton"], pieces=pieces, payload_bytes=total)

    def to_json(self) -> bytes:
        return encoded(json.dumps(self.skeleton, separators=(",", ":")), pieces_json(self.pieces), self.payload_bytes)

    @classmethod
    def from_json(cls, data: bytes) -> Table:
        """The table in `data`. Raises SnapshotError for anything else."""
        return cls.from_object(parse(data, "the tensor table"))

    @classmethod
    def of(cls, layout: Layout, data: bytes) -> Table:
        """The table in `data`, which this process has written for a state that lies as `layout` says."""
        return cls(pieces=layout.pieces, payload_bytes=layout.payload_bytes, skeleton=json.loads(data)["skeleton"])


def plan(
    skeleton: Json,
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    parts: Mapping[str, Sequence[Part]] = MappingProxyType({}),
) -> Table:
    """The table of a state with this skeleton, laid out as `lay_out` does."""
    layout = lay_out(tensors, parts)
    return Table(skeleton=skeleton, pieces=layout.pieces, payload_bytes=layout.payload_bytes)


def lay_out(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], parts: Mapping[str, Sequence[Part]] = MappingProxyType({})
) -> Layout:
    """Lay out tensors given as (name, dtype, shape), in that order; `parts` by name, where they are known. Raises SnapshotError for an
    unknown dtype."""
    pieces: list[Piece] = []
    end = 0
    for name, dtype, shape in tensors:
        if dtype not in ITEM_BYTES:
            raise SnapshotError(f"tensor {name!r} has the dtype {dtype}, which can't be saved")
        offset = _WHOLE.aligned(end, ALIGN_BYTES)
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        pieces.append(
            Piece(name=name, dtype=dtype, shape=shape, offset=offset, nbytes=nbytes, parts=tuple(parts.get(name, ())))
        )
        end = offset + nbytes
    return Layout(pieces=tuple(pieces), payload_bytes=padded(max(end, 1)))


def encoded(skeleton: str, pieces: str, payload_bytes: int) -> bytes:
    """A table's JSON, of which the two large parts are written."""
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
            *([[part_row(part) for part in each.parts]] if each.parts else []),
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


def parse(data: bytes, where: str) -> Json:
    """JSON, or SnapshotError."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"{where} is not readable as JSON ({error}); it is damaged") from None


def strict(found: Json, where: str, **kinds: type) -> Mapping[str, Any]:
    """`found`, if it is an object with exactly these keys and types (object: any). Raises SnapshotError."""
    if not isinstance(found, dict) or found.keys() != kinds.keys():
        keys = str(sorted(found))[:200] if isinstance(found, dict) else type(found).__name__
        raise SnapshotError(f"{where} should have {sorted(kinds)}, and has {keys}; it is damaged or of another version")
    for key, kind in kinds.items():
        if kind is not object and type(found[key]) is not kind:  # by exact type: a bool is no int here
            raise SnapshotError(f"{where}: {key} should be of type {kind.__name__}, and is {str(found[key])[:200]}")
    return found


def _piece(row: Json) -> Piece:
    match row:
        case [str(name), str(dtype), list(shape), int(offset), *more] if (
            dtype in ITEM_BYTES
            and _sizes([*shape, offset])
            and math.prod(max(size, 1) for size in shape) < 1 << 59
            and (not more or (len(more) == 1 and isinstance(more[0], list)))
        ):
            nbytes = math.prod(shape) * ITEM_BYTES[dtype]
            parts = tuple(_part(part, math.prod(shape)) for part in (more[0] if more else ()))
            return Piece(name=name, dtype=dtype, shape=tuple(shape), offset=offset, nbytes=nbytes, parts=parts)
    raise SnapshotError(f"the tensor table has a malformed row {str(row)[:200]}")


def _part(row: Json, elements: int) -> Part:
    """A part of a tensor of so many elements. Raises SnapshotError unless all of it lies within."""
    match row:
        case [
            str(name),
            list(shape),
            list(offset),
            list(box),
            flat,
            list(replica),
            int(start),
            strides,
            int(stacked),
            bool(padded),
        ] if (
            _sizes([*shape, *offset, *box, *replica, start, stacked])
            and len(shape) == len(offset) == len(box) >= stacked
            and all(at + size <= whole for at, size, whole in zip(offset, box, shape, strict=True))
            and math.prod(max(size, 1) for size in shape) < 1 << 59
            and (flat is None or (isinstance(flat, list) and len(flat) == 2 and _sizes(flat) and strides is None))
            and (strides is None or (isinstance(strides, list) and len(strides) == len(box) and _sizes(strides)))
        ):
            part = Part(
                name=name,
                shape=tuple(shape),
                offset=tuple(offset),
                box=tuple(box),
                flat=None if flat is None else (flat[0], flat[1]),
                replica=tuple(replica),
                start=start,
                strides=None if strides is None else tuple(strides),
                stacked=stacked,
                padded=padded,
            )
            inside = flat is None or flat[0] <= flat[1] <= math.prod(box)
            if inside and (not part.elements or part.last < elements):
                return part
    raise SnapshotError(f"the tensor table has a malformed part {str(row)[:200]}")


def _sizes(found: Sequence[Json]) -> bool:
    return len(found) <= 256 and all(type(size) is int and 0 <= size < 1 << 60 for size in found)
