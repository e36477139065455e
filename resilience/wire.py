"""Frozen dataclasses to JSON and back, by their type hints. What the store, the journal and the terminal share."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable
from enum import Enum
from functools import cache, lru_cache
from typing import Any, TypeVar

from .errors import InternalError

T = TypeVar("T")


def dumps(record: Any) -> bytes:
    """The record as one line of JSON, UTF-8."""
    return _ENCODER.encode(record).encode()


def loads(cls: type[T], data: bytes | str) -> T:
    """The record back. Unknown fields are ignored (a newer agent may have written them); a missing or mistyped one is an InternalError."""
    return _loaded(cls, data)  # type: ignore[arg-type]


@lru_cache(maxsize=512)
def _loaded(cls: Any, data: bytes | str) -> Any:
    """Who looks at the whole World every second mostly meets what it has met before: the same bytes give the same record, which nobody
    changes."""
    try:
        return _reader(cls)(json.loads(data))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InternalError(f"cannot read a {cls.__name__} from {data[:200]!r}: {error}") from error


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _hints(type(record))}  # type: ignore[arg-type]


_ENCODER = json.JSONEncoder(separators=(",", ":"), default=_fields)


@cache
def _reader(hint: Any) -> Callable[[Any], Any]:
    """What makes a value of this type from what JSON has given."""
    if hint is Any:
        return lambda value: value
    if isinstance(hint, typing.NewType):
        return _reader(hint.__supertype__)  # type: ignore[arg-type]
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        read = _reader(next(option for option in typing.get_args(hint) if option is not type(None)))
        return lambda value: None if value is None else read(value)
    if origin is tuple:
        return _tuple_reader(_reader(typing.get_args(hint)[0]))
    if origin is dict:
        key, item = map(_reader, typing.get_args(hint))
        return lambda value: {key(k): item(v) for k, v in value.items()}
    if dataclasses.is_dataclass(hint):
        readers = {name: _reader(known) for name, known in _hints(hint).items()}  # type: ignore[arg-type]
        return lambda value: hint(**{n: read(value[n]) for n, read in readers.items() if n in value})  # type: ignore[operator]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint
    return _plain_reader(hint)


def _tuple_reader(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def build(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise TypeError(f"{value!r} is no list")
        return tuple([read(element) for element in value])

    return build


def _plain_reader(hint: type) -> Callable[[Any], Any]:
    def build(value: Any) -> Any:
        if hint is float and isinstance(value, int):
            return float(value)
        if not isinstance(value, hint):
            raise TypeError(f"{value!r} is not {hint}")
        return value

    return build


@cache
def _hints(cls: type) -> dict[str, Any]:
    known = typing.get_type_hints(cls)
    return {f.name: known[f.name] for f in dataclasses.fields(cls)}
