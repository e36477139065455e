"""What tensors a slot or slab holds, and where: a table of pieces. Pure.

plan (names, dtypes, shapes) → `Table` → JSON beside the payload → `Table` again, believed only if every number fits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..resilience.errors import SnapshotError
from .tree import Json

ALIGN_BYTES = 64
"""A cache line, and more than any dtype's alignment."""

CHUNK_BYTES = 4 << 20
"""Unit of checksums and of reading (facts: larger ones do not get faster)."""

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
    """One tensor: `nbytes` contiguous bytes at `offset` of the payload, row-major, little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Table:
    """Everything but the bytes. `payload_bytes` is padded to whole chunks, gaps and padding are zero."""

    skeleton: Json
    pieces: tuple[Piece, ...]
    payload_bytes: int

    @property
    def chunk_bytes(self) -> int:
        return min(CHUNK_BYTES, self.payload_bytes)

    def as_object(self) -> Json:
        pieces = [[piece.name, piece.dtype, list(piece.shape), piece.offset] for piece in self.pieces]
        return {"skeleton": self.skeleton, "pieces": pieces, "payload_bytes": self.payload_bytes}

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
            if piece.offset < end or piece.offset % ALIGN_BYTES or piece.offset + piece.nbytes > total:
                raise SnapshotError(
                    f"tensor {piece.name!r} lies outside the payload, over another tensor, or unaligned"
                )
            if piece.name in names:
                raise SnapshotError(f"the tensor table names {piece.name!r} twice")
            names.add(piece.name)
            end = piece.offset + piece.nbytes
        return cls(skeleton=table["skeleton"], pieces=pieces, payload_bytes=total)

    def to_json(self) -> bytes:
        return json.dumps(self.as_object(), separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Table:
        """The table in `data`. Raises SnapshotError for anything else."""
        return cls.from_object(parse(data, "the tensor table"))


def plan(skeleton: Json, tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> Table:
    """Lay out tensors given as (name, dtype, shape), in that order. Raises SnapshotError for an unknown dtype."""
    pieces: list[Piece] = []
    end = 0
    for name, dtype, shape in tensors:
        if dtype not in ITEM_BYTES:
            raise SnapshotError(f"tensor {name!r} has the dtype {dtype}, which can't be saved")
        offset = -(-end // ALIGN_BYTES) * ALIGN_BYTES
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        pieces.append(Piece(name=name, dtype=dtype, shape=shape, offset=offset, nbytes=nbytes))
        end = offset + nbytes
    return Table(skeleton=skeleton, pieces=tuple(pieces), payload_bytes=padded(max(end, 1)))


def padded(nbytes: int) -> int:
    """`nbytes` rounded up to whole chunks; less than one chunk, to whole pages."""
    unit = CHUNK_BYTES if nbytes > CHUNK_BYTES else 4096
    return -(-nbytes // unit) * unit


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
        case [str(name), str(dtype), list(shape), int(offset)] if (
            dtype in ITEM_BYTES
            and len(shape) <= 64
            and all(type(size) is int and size >= 0 for size in (*shape, offset))
            and math.prod(max(size, 1) for size in shape) < 1 << 59
        ):
            nbytes = math.prod(shape) * ITEM_BYTES[dtype]
            return Piece(name=name, dtype=dtype, shape=tuple(shape), offset=offset, nbytes=nbytes)
    raise SnapshotError(f"the tensor table has a malformed row {str(row)[:200]}")
