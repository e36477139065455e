"""Fields, types and ranges that the JSON of a snapshot may contain, all checked before use. Pure.

bytes → `parse` → `checked`, against one of the structs in `sharding.py`, `tensor_table.py` and `manifest.py`. No size, count or index
exceeds the limits here. `tensor_table.py` and `shared_chunks.py` check that these numbers fit each other.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
from msgspec import Meta

from ...resilience.errors import SnapshotError

MOST_AXES = 64
"""The most axes of a tensor, as in numpy."""
MOST_NAME = 1 << 16
MOST_ELEMENTS = 1 << 59
"""Upper bound of a tensor's number of elements. The size in bytes of every smaller tensor fits into 64 bits."""

Size = Annotated[int, Meta(ge=0, lt=1 << 60)]
Word = Annotated[int, Meta(ge=0, lt=1 << 32)]
Name = Annotated[str, Meta(max_length=MOST_NAME)]
Axes = Annotated[tuple[Size, ...], Meta(max_length=MOST_AXES)]
Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]

_Form = TypeVar("_Form")
_SHOWN = 200
"""The most characters of the input that an error message repeats."""


def parse(data: bytes, where: str) -> Any:
    """Return the parsed JSON. Raises SnapshotError for invalid JSON."""
    try:
        return json.loads(data, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"{where} is not readable as JSON ({str(error)[:_SHOWN]}); it is damaged") from None


def checked(found: Any, form: type[_Form], where: str) -> _Form:
    """Return `found`, converted to `form`, if it has exactly the form's fields, types and ranges. A bool is not accepted as an int, nor NaN
    as a number. Raises SnapshotError otherwise."""
    try:
        return msgspec.convert(found, form, strict=True)
    except (msgspec.ValidationError, RecursionError, UnicodeError) as error:  # UnicodeError: a lone surrogate
        raise SnapshotError(f"{where} is damaged, or of another version: {str(error)[:_SHOWN]}") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON's")
