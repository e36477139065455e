"""What the JSON of a snapshot may contain: fields, kinds and ranges, all checked before use. Pure.

bytes → `parse` → `checked`, by one of the forms here or in `manifest.py`. No size, count or index exceeds these bounds. `tensor_table.py`
and `shared_chunks.py` check that they fit each other.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
from msgspec import Meta, Struct

from ...resilience.errors import SnapshotError

MOST_AXES = 64
"""As many as numpy's arrays have."""
MOST_NAME = 1 << 16
MOST_ELEMENTS = 1 << 59
"""Of a tensor: its size in bytes still fits into 64 bits."""

Size = Annotated[int, Meta(ge=0, lt=1 << 60)]
Word = Annotated[int, Meta(ge=0, lt=1 << 32)]
Name = Annotated[str, Meta(max_length=MOST_NAME)]
Axes = Annotated[tuple[Size, ...], Meta(max_length=MOST_AXES)]
Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]

_Form = TypeVar("_Form")
_SHOWN = 200
"""Characters of the input that a message repeats."""


class PartForm(Struct, array_like=True, forbid_unknown_fields=True):
    """A row of a `sharding.Part`, in the order of its fields."""

    name: Name
    shape: Axes
    offset: Axes
    box: Axes
    flat: tuple[Size, Size] | None
    replica: Axes
    start: Size
    strides: Axes | None
    stacked: Size
    padded: bool


class PieceForm(Struct, array_like=True, forbid_unknown_fields=True):
    """A row of a `tensor_table.Piece`."""

    name: Name
    dtype: str
    shape: Axes
    offset: Size
    parts: list[PartForm] = []
    trained: bool = False


class TableForm(Struct, forbid_unknown_fields=True):
    skeleton: Any
    pieces: list[PieceForm]
    payload_bytes: Annotated[int, Meta(ge=1, lt=1 << 60)]


def parse(data: bytes, where: str) -> Any:
    """Return the parsed JSON. Raises SnapshotError."""
    try:
        return json.loads(data, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"{where} is not readable as JSON ({str(error)[:_SHOWN]}); it is damaged") from None


def checked(found: Any, form: type[_Form], where: str) -> _Form:
    """Return `found` if it has exactly the fields, kinds and ranges of `form`. A bool does not count as an int, nor NaN as a number. Raises
    SnapshotError otherwise."""
    try:
        return msgspec.convert(found, form, strict=True)
    except (msgspec.ValidationError, RecursionError, UnicodeError) as error:  # the last for a lone surrogate
        raise SnapshotError(f"{where} is damaged, or of another version: {str(error)[:_SHOWN]}") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON's")
