"""Lists the tensors of a nested state in one pass. Builds their names, and the skeleton that `pytree.py` reads, only if the structure has
changed since the last state. Pure; uses neither torch nor files.

Between two steps, thousands of tensors have new bytes, and only a few numbers have changed. So the pass (`Walk`) only lists types, keys,
plain values and tensors. States with equal types and keys have the same names, and the same JSON except for the numbers (`Form`). The pass
never infers from a tensor's identity that the tensor is unchanged. No reference to a tensor is kept.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import numpy as np

from ...resilience.errors import SnapshotError
from .pytree import SCALARS, Json, Tagged, join, plain

PLAIN = frozenset((bool, str, int, float, bytes, type(None), *(np.dtype(code).type for code in "?bhilqBHILQefdFD")))
"""The types of plain values. All are immutable, so the same object always has the same value, to the bit."""
_MAPPINGS = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_NO_LEAVES = PLAIN | _MAPPINGS.keys() | {list, tuple, Tagged}
_ENCODE = json.JSONEncoder(separators=(",", ":")).encode
_INT = range(-(1 << 63), 1 << 63)
MOST_LEVELS = 200
"""The most containers that may be nested in each other. Reading needs two Python frames per level. Python's limit is 1,000 frames, and the
script may have used half of them. Without this limit, Python 3.12 would write states that it cannot read."""
TOO_DEEP = "the state contains itself, or is nested hundreds of levels deep; it can't be saved"


def is_plain(value: Any) -> bool:
    """Return whether the value is plain, or a tuple of plain values."""
    return type(value) in PLAIN or (type(value) is tuple and PLAIN.issuperset(map(type, value)))


class Walk:
    """Lists the contents of a state, depth first. Raises SnapshotError for a state that contains itself."""

    def __init__(self, state: Any) -> None:
        self.kinds: list[Any] = []
        """The type of everything in the state. A container's type is followed by the number of its items and, for a dict, the types of its
        keys."""
        self.keys: list[Any] = []
        self.values: list[Any] = []
        self.leaves: list[Any] = []
        """Tensors and arrays. Until a `Form` is made from the walk, also all objects that cannot be saved."""
        try:
            self._down(state)
        except RecursionError:
            raise SnapshotError(TOO_DEEP) from None

    def _down(self, state: Any) -> None:
        kinds, keys, values, leaves = self.kinds, self.keys, self.values, self.leaves

        def down(value: Any, level: int) -> None:  # runs thousands of times between two steps: every test costs time
            kind = type(value)
            kinds.append(kind)
            if kind in PLAIN:
                values.append(value)
                return
            if kind not in _NO_LEAVES:
                leaves.append(value)
                return
            if level > MOST_LEVELS:
                raise SnapshotError(TOO_DEEP)
            kinds.append(len(value))
            items: Iterable[Any] = value
            if kind in _MAPPINGS:
                kinds.extend(map(type, value))
                keys.extend(value)
                items = value.values()
            if _NO_LEAVES.isdisjoint(map(type, items)):
                kinds.extend(map(type, items))
                leaves.extend(items)
            elif PLAIN.issuperset(map(type, items)):
                kinds.extend(map(type, items))
                values.extend(items)
            else:
                for item in items:
                    down(item, level + 1)  # noqa: F821 (it is deleted below)

        down(state, 1)
        del down  # the function refers to itself, and would keep all leaves alive


class Form:
    """The structure of a state. States that differ only in plain values and in their tensors' properties have the same form."""

    def __init__(self, walk: Walk, is_leaf: Callable[[Any], bool]) -> None:
        """is_leaf: returns whether a value is a tensor. Raises SnapshotError, with path and type, for a value that cannot be restored
        exactly: other types, and subclasses of known types."""
        self._kinds, self._keys, self._values = walk.kinds, walk.keys, walk.values
        writing = _Writing(walk, is_leaf)
        self.names = list(writing.names)
        """Unique names of the leaves."""
        self._texts = writing.texts()
        for number, value in enumerate(walk.values):
            self._texts[2 * number + 1] = text(value)

    def fits(self, walk: Walk) -> bool:
        return self._kinds == walk.kinds and self._keys == walk.keys  # comparing `_kinds` has compared the keys' types

    def skeleton(self, values: list[Any]) -> str:
        """Return the JSON of a state that has this form and the plain values `values`."""
        for number, (value, known) in enumerate(zip(values, self._values, strict=True)):
            if value is not known:
                self._texts[2 * number + 1] = text(value)
        self._values = values
        return "".join(self._texts)


def flatten(state: Any, is_leaf: Callable[[Any], bool]) -> tuple[Json, list[tuple[str, Any]]]:
    """Return the skeleton of `state`, and a list of its leaves with unique names. Leaves are numpy arrays, and values that `is_leaf`
    accepts (tensors). Raises SnapshotError as `Form` does."""
    walk = Walk(state)
    form = Form(walk, is_leaf)
    return json.loads(form.skeleton(walk.values)), list(zip(form.names, walk.leaves, strict=True))


class _Writing:
    """Writes the skeleton's JSON as a list of texts, with an empty text in place of each plain value."""

    def __init__(self, walk: Walk, is_leaf: Callable[[Any], bool]) -> None:
        self._kinds, self._keys, self._leaves = iter(walk.kinds), iter(walk.keys), iter(walk.leaves)
        self._is_leaf = is_leaf
        self.names: dict[str, None] = {}
        self._copies: Counter[str] = Counter()
        """How many suffixed names were made from a path that several leaves share."""
        self._said: list[str | None] = []
        """JSON texts, with None in place of a plain value."""
        try:
            self._down("")
            json.loads("".join("0" if said is None else said for said in self._said))  # fails if too deep to be read
        except RecursionError:
            raise SnapshotError(TOO_DEEP) from None

    def texts(self) -> list[str]:
        found, around = [], list[str]()
        for said in self._said:
            if said is None:
                found += ["".join(around), ""]
                around = []
            else:
                around.append(said)
        return [*found, "".join(around)]

    def _down(self, path: str) -> None:
        kind = next(self._kinds)
        if kind in PLAIN:
            self._said.append(None)
        elif kind in _MAPPINGS:
            count = next(self._kinds)
            kinds, keys = list(islice(self._kinds, count)), list(islice(self._keys, count))
            self._say(f'{{"{_MAPPINGS[kind]}":[')
            for number, (kind_of_key, key) in enumerate(zip(kinds, keys, strict=True)):
                if kind_of_key is not str and kind_of_key is not int:
                    raise SnapshotError(
                        f"{_at(path)}: the key {_shown(key)} is neither a string nor an integer; it can't be saved"
                    )
                self._say(f"{',' * (number > 0)}[{text(key)},")
                self._down(join(path, key))
                self._say("]")
            self._say("]}")
        elif kind is list or kind is tuple:
            self._say("[" if kind is list else '{"tuple":[')
            for number in range(next(self._kinds)):
                self._say("," * (number > 0))
                self._down(join(path, number))
            self._say("]" if kind is list else "]}")
        elif kind is Tagged:
            next(self._kinds)
            self._say('{"tagged":[')
            self._down(path)
            self._say(",")
            self._down(path)
            self._say("]}")
        else:
            leaf = next(self._leaves)
            self._say(f'{{"{_tag(leaf, self._is_leaf, path)}":{json.dumps(self._name(path))}}}')

    def _say(self, text: str) -> None:
        self._said.append(text)

    def _name(self, path: str) -> str:
        name = path or "state"
        while name in self.names:  # the keys 1 and "1", or a key with a slash in it
            self._copies[path] += 1
            name = f"{path}~{self._copies[path] + 1}"
        self.names[name] = None
        return name


def _tag(leaf: Any, is_leaf: Callable[[Any], bool], path: str) -> str:
    if is_leaf(leaf):
        return "leaf"
    kind = type(leaf)
    if kind is np.ndarray and leaf.dtype.name in SCALARS and leaf.dtype.isnative:
        return "array"
    what = f"an array of {leaf.dtype}" if kind is np.ndarray else f"a {kind.__module__}.{kind.__qualname__}"
    raise SnapshotError(f"{_at(path)}: {what} can't be saved; remove it, or turn it into numbers, strings or tensors")


def text(value: Any) -> str:
    if (
        type(value) is int and value in _INT
    ):  # the same text as JSON's, written faster: lists may have thousands of items
        return repr(value)
    return _ENCODE(plain(value))


def _shown(key: Any) -> str:
    try:
        return repr(key)[:80]
    except Exception as error:  # the key's __repr__ is not our code, and Python limits digits
        return f"of type {type(key).__qualname__} ({error})"


def _at(path: str) -> str:
    return f"state[{path}]" if path else "the state"
