"""Frozen dataclasses to JSON and back, by their type hints. What the store, the journal and the terminal share."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from enum import Enum
from functools import cache
from typing import Any, TypeVar

from .errors import InternalError

T = TypeVar("T")


def dumps(record: Any) -> bytes:
    """The record as one line of JSON, UTF-8."""
    return json.dumps(dataclasses.asdict(record), separators=(",", ":")).encode()


def loads(cls: type[T], data: bytes | str) -> T:
    """The record back. Unknown fields are ignored (a newer agent may have written them); a missing or mistyped one is an InternalError."""
    try:
        return _build(cls, json.loads(data))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InternalError(f"cannot read a {cls.__name__} from {data[:200]!r}: {error}") from error


def _build(hint: Any, value: Any) -> Any:
    if hint is Any:
        return value
    if isinstance(hint, typing.NewType):
        return _build(hint.__supertype__, value)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        return None if value is None else _build(options[0], value)
    if origin is tuple:
        if not isinstance(value, list):
            raise TypeError(f"{value!r} is no list")
        item = typing.get_args(hint)[0]
        return tuple(_build(item, element) for element in value)
    if origin is dict:
        key, item = typing.get_args(hint)
        return {_build(key, k): _build(item, v) for k, v in value.items()}
    if dataclasses.is_dataclass(hint):
        hints = _hints(hint)  # type: ignore[arg-type]
        return hint(**{name: _build(hints[name], value[name]) for name in hints if name in value})  # type: ignore[operator]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    if hint is float and isinstance(value, int):
        return float(value)
    if not isinstance(value, hint):
        raise TypeError(f"{value!r} is not {hint}")
    return value


@cache
def _hints(cls: type) -> dict[str, Any]:
    known = typing.get_type_hints(cls)
    return {f.name: known[f.name] for f in dataclasses.fields(cls)}
