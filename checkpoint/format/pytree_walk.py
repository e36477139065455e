"""A nested state → its tensors in one pass; their names, and the skeleton that `pytree.py` reads, only where it is made otherwise than the
last one. Pure; knows neither torch nor files.

A training's boundary meets thousands of tensors, of which only the bytes are new, and a few numbers. So the pass (`Walk`) lists what it
meets and does no more. What has the same lists has the same names and the same JSON but for the numbers (`Form`). Nothing is concluded
from a tensor's being the same object as before, and none is held on to.
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
"""Immutable, all of them: the same object is the same value, to the bit."""
_MAPPINGS = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_NO_LEAVES = PLAIN | _MAPPINGS.keys() | {list, tuple, Tagged}
_ENCODE = json.JSONEncoder(separators=(",", ":")).encode
_INT = range(-(1 << 63), 1 << 63)
MOST_LEVELS = 200
"""Of containers within each other. Reading takes two of Python's frames a level, of the 1,000 that the script may have used half of; Python
3.12 would write more than it can read."""
TOO_DEEP = "the state contains itself, or is nested hundreds of levels deep; it can't be saved"


class Walk:
    """What a state is made of, depth first. Raises SnapshotError for one that contains itself."""

    def __init__(self, state: Any) -> None:
        self.kinds: list[Any] = []
        """The type of everything in it; a container's is followed by the number of its items and, in a dict, the types of its keys."""
        self.keys: list[Any] = []
        self.values: list[Any] = []
        self.leaves: list[Any] = []
        """Tensors and arrays; and, until a `Form` is made of this, whatever can't be saved."""
        try:
            self._down(state)
        except RecursionError:
            raise SnapshotError(TOO_DEEP) from None

    def _down(self, state: Any) -> None:
        kinds, keys, values, leaves = self.kinds, self.keys, self.values, self.leaves

        def down(value: Any, level: int) -> None:  # at a boundary, thousands of times: every test counts
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
                    down(item, level + 1)  # noqa: F821 (it is deleted behind)

        down(state, 1)
        del down  # it knows itself, and would hold on to all leaves


class Form:
    """How a state is made: the same for two that differ in plain values and in what their tensors are like."""

    def __init__(self, walk: Walk, is_leaf: Callable[[Any], bool]) -> None:
        """is_leaf: what is a tensor. Raises SnapshotError, with place and type, for whatever could not be given back exactly: other types,
        subclasses of known ones."""
        self._kinds, self._keys, self._values = walk.kinds, walk.keys, walk.values
        writing = _Writing(walk, is_leaf)
        self.names = list(writing.names)
        """Of the leaves, unique."""
        self._texts = writing.texts()
        for number, value in enumerate(walk.values):
            self._texts[2 * number + 1] = text(value)

    def fits(self, walk: Walk) -> bool:
        return self._kinds == walk.kinds and self._keys == walk.keys  # keys of equal types, for kinds has these

    def skeleton(self, values: list[Any]) -> str:
        """The JSON of a state of this form with these plain values."""
        for number, (value, known) in enumerate(zip(values, self._values, strict=True)):
            if value is not known:
                self._texts[2 * number + 1] = text(value)
        self._values = values
        return "".join(self._texts)


def flatten(state: Any, is_leaf: Callable[[Any], bool]) -> tuple[Json, list[tuple[str, Any]]]:
    """Skeleton of `state`, and its leaves by unique name, in order: what `is_leaf` says (tensors), and numpy arrays. Raises SnapshotError
    as `Form` does."""
    walk = Walk(state)
    form = Form(walk, is_leaf)
    return json.loads(form.skeleton(walk.values)), list(zip(form.names, walk.leaves, strict=True))


class _Writing:
    """The skeleton's JSON: texts of what is around the plain values, and an empty one in the place of each."""

    def __init__(self, walk: Walk, is_leaf: Callable[[Any], bool]) -> None:
        self._kinds, self._keys, self._leaves = iter(walk.kinds), iter(walk.keys), iter(walk.leaves)
        self._is_leaf = is_leaf
        self.names: dict[str, None] = {}
        self._copies: Counter[str] = Counter()
        """How many names have been made of one that others have too."""
        self._said: list[str | None] = []
        """None in the place of a plain value."""
        try:
            self._down("")
            json.loads("".join("0" if said is None else said for said in self._said))  # too deep for JSON: never read
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
    raise SnapshotError(
        f"{_at(path)}: {what} can't be saved; leave it out, or turn it into numbers, strings or tensors"
    )


def text(value: Any) -> str:
    if (
        type(value) is int and value in _INT
    ):  # as JSON writes it, without its machinery: there may be lists of thousands
        return repr(value)
    return _ENCODE(plain(value))


def _shown(key: Any) -> str:
    try:
        return repr(key)[:80]
    except Exception as error:  # other people's code; and Python's limit of digits
        return f"of type {type(key).__qualname__} ({error})"


def _at(path: str) -> str:
    return f"state[{path}]" if path else "the state"
