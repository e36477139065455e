"""The JSON skeleton of a nested state: everything but its leaves (tensors and arrays). Pure; uses neither torch nor files.

`pytree_walk.py` takes tensors and arrays out of dicts, lists and tuples and leaves their names behind. `unflatten` puts them back. All
other values (numbers, strings, bytes, None) are in the skeleton itself, exact to the bit. A value that JSON can express is plain JSON. Any
other value is an object with one key, the tag: `{"tuple": […]}`, `{"leaf": "model/weight"}`. A value composed of other values has the tag
`{"tagged": ["deque", […]]}`, and only the code that tagged it can rebuild it.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ...resilience.errors import SnapshotError

Json = Any
"""A value that json.loads returns."""

SCALARS = frozenset(np.dtype(code).name for code in "?bhilBHILefdFD")
"""The numpy dtypes that are plain bytes."""

_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_PLAIN = 1 << 63
"""An int of at least this absolute value is written in hex: some JSON readers have no big ints, and Python limits decimal digits."""


class Tagged(tuple[Any, ...]):
    """(kind, content): a value that is neither plain nor one of the containers above, decomposed into its content. This module does not
    rebuild the value from its content. If the kind is empty, the value is just its content, and only the source that saved it knows its
    type."""

    __slots__ = ()


def unflatten(
    skeleton: Json, leaves: Mapping[str, Any], array: Callable[[Any], Any] = lambda leaf: np.asarray(leaf).copy()
) -> Any:
    """Return the state, with `leaves` in their places. array: turns a leaf that was an array into an array again.

    Raises SnapshotError for a skeleton that `flatten` cannot have created, and for a missing leaf.
    """
    try:
        return _up(skeleton, leaves, array)
    except RecursionError:
        raise SnapshotError("the snapshot's skeleton is nested too deep; it is damaged") from None


def values(skeleton: Json) -> Iterator[tuple[str, Json]]:
    """Yield everything that is not a leaf as (path, JSON value), unsorted. For a container, the value is its kind and length."""
    todo: list[tuple[str, Json]] = [("", skeleton)]
    while todo:
        path, node = todo.pop()
        tag, inner = _tagged(node) if isinstance(node, dict) else ("list" if isinstance(node, list) else "", node)
        if tag == "tagged":
            kind, content = _kind_and_content(inner)
            todo.append((path, content))
            yield path, {tag: kind}
        elif tag in (*_MAPPINGS, "tuple", "list"):
            pairs = list(_pairs(inner) if tag in _MAPPINGS else enumerate(_list(inner)))
            todo += [(join(path, key), item) for key, item in pairs]
            yield path, {tag: len(pairs)}
        elif tag not in ("leaf", "array"):
            yield path, node


def readable(value: Any) -> Json:
    """Return plain values as JSON for people: bytes, NaN, Inf and large integers as text, tuples as lists, keys as text."""
    if isinstance(value, Mapping):
        return {_said(key): readable(item) for key, item in value.items()}
    if isinstance(value, Tagged):
        kind, content = value
        return {kind: readable(content)} if kind else readable(content)
    if isinstance(value, (list, tuple)):
        return [readable(item) for item in value]
    if isinstance(value, np.generic):
        return readable(value.item())
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, (float, complex)) and not (isinstance(value, float) and math.isfinite(value)):
        return str(value)
    return _said(value) if type(value) is int and not -_PLAIN <= value < _PLAIN else value


def plain(value: Any) -> Json:
    """Return a value that is not a container as JSON, exact to the bit."""
    if type(value) is int and not -_PLAIN <= value < _PLAIN:
        return {"int": hex(value)}
    if type(value) is float and not math.isfinite(value):
        return {"float": struct.pack(">d", value).hex()}
    if type(value) is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.generic):
        return {"numpy": [value.dtype.name, value.tobytes().hex()]}
    return value


def _up(node: Json, leaves: Mapping[str, Any], array: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    if isinstance(node, list):
        return [_up(item, leaves, array) for item in node]
    if not isinstance(node, dict):
        return node
    tag, inner = _tagged(node)
    try:
        match tag:
            case "dict" | "ordered" | "counter":
                return _MAPPINGS[tag]({key: _up(item, leaves, array) for key, item in _pairs(inner)})
            case "tuple":
                return tuple(_up(item, leaves, array) for item in _list(inner))
            case "tagged":
                kind, content = _kind_and_content(inner)
                return Tagged((kind, _up(content, leaves, array)))
            case "leaf":
                return leaves[inner]
            case "array":
                return array(leaves[inner])
            case "int":
                return int(inner, 16)
            case "float":
                return struct.unpack(">d", bytes.fromhex(inner))[0]
            case "bytes":
                return base64.b64decode(inner, validate=True)
            case "numpy" if inner[0] in SCALARS:
                (scalar,) = np.frombuffer(bytes.fromhex(inner[1]), dtype=inner[0])
                return scalar
    except KeyError:
        raise SnapshotError(f"the snapshot's skeleton names a tensor {inner!r} that is not in it") from None
    except (TypeError, ValueError, IndexError, struct.error, binascii.Error) as error:
        raise SnapshotError(f"the snapshot's skeleton has a malformed {tag}: {error}") from None
    raise SnapshotError(
        f"the snapshot's skeleton has a value of the unknown kind {tag!r}; a newer version may have written it"
    )


def _tagged(node: dict[str, Json]) -> tuple[str, Json]:
    if len(node) != 1:
        raise SnapshotError(f"the snapshot's skeleton has an object with {len(node)} kinds where one is due")
    return next(iter(node.items()))


def _kind_and_content(inner: Json) -> tuple[str, Json]:
    match inner:
        case [str(kind), content]:
            return kind, content
    raise SnapshotError("the snapshot's skeleton has something tagged without a kind and content")


def _list(inner: Json) -> list[Json]:
    if not isinstance(inner, list):
        raise SnapshotError("the snapshot's skeleton has a tuple or dict without a list of items")
    return inner


def _pairs(inner: Json) -> Iterator[tuple[str | int, Json]]:
    for pair in _list(inner):
        key = _up(pair[0], {}) if isinstance(pair, list) and len(pair) == 2 else None
        if not isinstance(key, (str, int)) or isinstance(key, bool):
            raise SnapshotError("the snapshot's skeleton has a dict item without a string or integer key")
        # Interned, as literals in a program are: pickle writes a reference only for the same string object, not for an equal string.
        yield sys.intern(key) if isinstance(key, str) else key, pair[1]


def join(path: str, key: str | int) -> str:
    """Return the path of `key` inside the container at `path`."""
    return f"{path}/{_said(key)}" if path else _said(key)


def _said(key: str | int) -> str:
    return hex(key) if type(key) is int and not -_PLAIN <= key < _PLAIN else str(key)
