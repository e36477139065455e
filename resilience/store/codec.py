"""Frozen dataclasses to JSON and back, by their type hints. What the store, the journal and the terminal share."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from typing import Any, TypeVar

import msgspec

from ..errors import InternalError

T = TypeVar("T")


def dumps(record: Any) -> bytes:
    """The record as one line of JSON, UTF-8."""
    return _ENCODER.encode(record).encode()


def loads(cls: type[T], data: bytes | str) -> T:
    """The record back. Unknown fields are ignored (a newer agent may have written them); a missing or mistyped one is an InternalError."""
    try:
        return _decoder(cls).decode(data)  # type: ignore[arg-type]
    except (msgspec.DecodeError, ValueError):
        return _convert(cls, data)


def _convert(cls: type[T], data: bytes | str) -> T:
    """What only Python takes for JSON, as `dumps` writes it: NaN, and half of a surrogate pair, as in a path that is not UTF-8."""
    try:
        return msgspec.convert(json.loads(data), cls)
    except (msgspec.ValidationError, ValueError) as error:
        raise InternalError(f"cannot read a {cls.__name__} from {data[:200]!r}: {error}") from error


@cache
def _decoder(cls: type[T]) -> msgspec.json.Decoder[T]:
    return msgspec.json.Decoder(cls)


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _names(type(record))}  # type: ignore[arg-type]


@cache
def _names(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


_ENCODER = json.JSONEncoder(separators=(",", ":"), default=_fields)
