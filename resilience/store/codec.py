"""Converts frozen dataclasses to JSON and back, by their type hints. The store, the journal and the terminal use it."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from typing import Any, TypeVar

import msgspec

from ..errors import InternalError

T = TypeVar("T")


def dumps(record: Any) -> bytes:
    """Return the record as one line of JSON, in UTF-8."""
    return _ENCODER.encode(record).encode()


def printed(record: Any) -> str:
    """Return the record as JSON that other programs can read, too: NaN and infinity become null."""
    return json.dumps(json.loads(dumps(record), parse_constant=lambda name: None))


def loads(cls: type[T], data: bytes | str) -> T:
    """Return the record. Ignores unknown fields, which a newer agent may have written. Raises InternalError for a missing or mistyped
    field."""
    try:
        return _decoder(cls).decode(data)  # type: ignore[arg-type]
    except (msgspec.DecodeError, ValueError):
        return _convert(cls, data)


def _convert(cls: type[T], data: bytes | str) -> T:
    """Parse JSON that `dumps` may write and only Python accepts: NaN, and half a surrogate pair, as in a path that is not UTF-8."""
    try:
        return msgspec.convert(json.loads(data), cls, str_keys=True)
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
