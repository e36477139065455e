"""A snapshot's tensors as nodes of a zarr v3 hierarchy: paths, metadata documents, chunks. Pure; does not need zarr.

name → path → zarr.json; chunk key → the box (block of elements) of the tensor that the chunk contains.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any
from urllib.parse import unquote

from ..checkpoint.durable.snapshot_view import Tensor
from ..checkpoint.format.sharding import Shape
from ..checkpoint.format.tensor_table import ITEM_BYTES

CHUNK_BYTES = 32 << 20
"""Maximum bytes of a zarr chunk: eight chunks of a slab. At each end of a box, one or two more slab chunks must be read, although they
contain only a little of the box."""

METADATA = "zarr.json"
_FOREIGN = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
FOREIGN = frozenset(_FOREIGN)
"""Dtypes for which zarr v3 has no name. The names here are tensorstore's."""


def path_of(name: str, all_names: Collection[str]) -> str:
    """Return the path of the tensor `name`: each part before a slash is a group, and dots stay. A part that zarr would misread is
    %-encoded; an empty part is "%". If other names begin with `name` and a slash, the tensor would have to be a group too, so its path ends
    with a "%"."""
    path = "/".join(_encoded(part) for part in name.split("/"))
    return f"{path}%" if any(other.startswith(f"{name}/") for other in all_names) else path


def name_of(path: str) -> str:
    """Return the name from which `path_of` made `path`."""
    *first, last = path.split("/")
    last = last[:-1] if len(last) > 1 and last.endswith("%") else last
    return "/".join("" if part == "%" else unquote(part) for part in (*first, last))


def _encoded(part: str) -> str:
    if part in ("", "."):
        return "%2E" if part else "%"
    found = part.replace("%", "%25").replace("\\", "%5C")
    if part in ("..", METADATA):
        found = found.replace(".", "%2E", 1)
    return f"%5F{found[1:]}" if found.startswith("__") else found


@dataclass(frozen=True)
class Array:
    """A tensor as an array of chunks. A chunk is whole rows of the tensor or, if one row is too large, a part of a row."""

    tensor: Tensor
    as_integers: bool
    """Whether elements of a dtype that zarr does not know become integers of their size."""

    @cached_property
    def chunk(self) -> Shape:
        shape, room = [max(size, 1) for size in self.tensor.shape], CHUNK_BYTES // ITEM_BYTES[self.tensor.dtype]
        for axis in range(len(shape)):
            inner = math.prod(shape[axis + 1 :])
            shape[axis] = max(1, min(shape[axis], room // inner))
        return tuple(shape)

    @property
    def data_type(self) -> str:
        dtype = self.tensor.dtype
        return f"uint{8 * ITEM_BYTES[dtype]}" if self.as_integers and dtype in FOREIGN else dtype

    def metadata(self) -> dict[str, Any]:
        """Return the document zarr.json."""
        dtype = self.data_type
        zero: Any = False if dtype == "bool" else [0.0, 0.0] if dtype.startswith("complex") else 0
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.tensor.shape),
            "data_type": dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.chunk)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": zero,
            # zarr 3.4 requires the byte order of one-byte floats, too.
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
            "attributes": {"name": self.tensor.name, "dtype": self.tensor.dtype},
        }

    def box(self, indexes: tuple[int, ...]) -> tuple[Shape, Shape] | None:
        """Return the offset and shape of the box of the tensor that a chunk holds; None if there is no such chunk."""
        shape, chunk = self.tensor.shape, self.chunk
        offset = tuple(index * size for index, size in zip(indexes, chunk, strict=True))
        if any(at >= size for at, size in zip(offset, shape, strict=True)):
            return None
        return offset, tuple(min(c, size - at) for at, c, size in zip(offset, chunk, shape, strict=True))

    def chunk_keys(self) -> Iterator[str]:
        """Return the keys of all chunks, below the array's own path."""
        counts = (-(-size // chunk) for size, chunk in zip(self.tensor.shape, self.chunk, strict=True))
        return ("/".join(("c", *map(str, indexes))) for indexes in product(*map(range, counts)))
