"""A place that holds a value which may change, and what is kept of it: an attribute, a variable of a function, a number of a class.

What is kept is what `state/values/packing.py` makes of the value, where that is small. A value that is what it was when the loop began is
not kept: it may be a setting, and another one in the next life.
"""

from __future__ import annotations

import copy
import enum
import io
import random
from collections import deque
from collections.abc import Collection, Iterator
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from ...checkpoint.format.pytree import Tagged
from ...checkpoint.format.pytree_walk import PLAIN
from ...resilience.errors import SnapshotError
from ..state.values.array_views import is_plain_array, is_plain_tensor
from ..state.values.ctypes_values import is_c, size_of
from ..state.values.packing import MAPPINGS
from ..state.values.type_adapters import CHANGELESS, CHANGING, packed, unpacked
from ..state.values.value_source import Known, Packed
from .iterator_progress import go_to, is_read, position, progress

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random, np.random.BitGenerator)
OF_THE_RANK = (random.random.__self__, np.random.rand.__self__, torch.default_generator)  # type: ignore[attr-defined]
_EXACT = frozenset(GENERATORS)
ABSENT = object()
"""In place of a value: the place is empty."""
_GONE = object()
"""In place of one that was let go."""
SMALL = 1 << 15
"""Values in a list, or words in an array, with all that it holds: it is looked at with each batch."""
_OBJECT = SMALL // 64
"""An object takes as long as so many values."""
_FEW = 256
"""Among so many values generators are looked for."""
_SIMPLE = frozenset(each for kind in (*CHANGELESS, *CHANGING) for each in kind.types)
_NAMED = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, enum.Enum)
"""What does not change as long as it is the same object."""
_FILLED = (list, deque, set, np.ndarray, torch.Tensor, *MAPPINGS)
Kept = list[Any]
"""Of a place: its packed value, or nothing where it is empty."""


class Place:
    def __init__(self, name: str, first: Any, holders: Known, objects: bool = True) -> None:
        """first: what it holds when the loop begins. holders: what has places of its own. objects: those of any class are kept."""
        self._name, self._value, self._holders = name, first, holders
        self._packing = Packed(name, holders)
        self._objects = objects
        self._read = is_read(first)
        self._hopeless = False
        """It has changed, and cannot be kept:"""
        self.lost = False
        """and batches may depend on it."""
        self._packed: list[Any] = []
        """Parts of a list that was kept at last, which stay what they are;"""
        self._kept: Kept | None = None
        """and what was kept."""
        self._always = _draws(first)
        """A generator may be seeded otherwise in the next life."""
        self._parts = _parts(first) if all(map(self._fixed, _parts(first) or [first])) else None
        """Where nothing can change but which ones these are."""
        self._first = self._copy(first)
        """None: it can't be kept."""
        self._ordered = False
        """Only the order of its parts is kept."""
        if self._first is None and 0 < len(_parts(first)) <= SMALL:
            self._name_parts(first)
        self._plain = self._parts is not None and all(map(_is_plain, self._parts))
        self._version = _version(first)

    def _name_parts(self, first: Any) -> None:
        """Of a list that is too large, or holds what nobody can take apart, the order is kept."""
        known = Known()
        for name, thing in self._holders.things.items():
            known.add(name, thing)
        for at, part in enumerate(_parts(first)):
            if id(part) not in known.names and type(part) not in PLAIN:
                known.add(f"{self._name}.{at}", part)
        self._packing = Packed(self._name, known)
        self._first, self._ordered = self._copy(first, bounded=False), True
        self._parts = _parts(first)

    def state(self, live: Any) -> Kept | None:
        """What is kept of the value that it holds now; None: nothing."""
        if self._same(live) or (self._hopeless and type(live) not in PLAIN):
            return None
        if type(live) is list and len(live) == len(self._packed) and all(map(is_, live, self._packed)):
            return self._kept
        kept = self._pack(live)
        if kept is None:
            self._give_up(self._counts(live))
        elif self._read and kept == [None]:
            self.lost = True
        elif not self._always and self._first is not None and equal(kept, self._first):
            return None
        found = None if kept is None or isinstance(live, GENERATORS) else [*map(_copied, kept)]
        if type(live) is list and found and all(map(self._stays, live)):
            self._packed, self._kept = [*live], found
        return found or kept

    def _stays(self, part: Any) -> bool:
        return self._fixed(part) or id(part) in self._packing._known.names

    def _give_up(self, lost: bool) -> None:
        self._hopeless, self.lost = True, lost
        if self._first is None or self._ordered:  # it may be large
            self._value, self._first, self._parts = _GONE, None, None
            self._packing = Packed(self._name, self._holders)

    def calm(self, live: Any) -> bool:
        """Whether it stays as long as it is the same object."""
        return self._fixed(live)

    def put_back(self, kept: Kept | None, live: Any) -> Any:
        """The value that it has to hold, which is `live` where that can be filled. kept: None: what it was at first."""
        if self._read and live is self._value:
            go_to(live, (self._first or []) if kept is None else kept)
            return live
        if kept is None:
            if self._same(live):
                return live
            if self._first is None:
                return live if self._value is _GONE else self._value
            if self._pack(live) is None:  # an open file
                return live
            kept = self._first
        if not kept:
            return ABSENT
        if isinstance(live, random.Random) and type(live) is not random.Random:
            live.setstate(unpacked(kept[0]))
            return live
        free = live is not ABSENT and id(live) not in self._packing._known.names
        return self._packing.unpack(_copied(kept[0]), live if free else None)

    def _same(self, live: Any) -> bool:
        """Whether it is what it was at first: what can be seen at once."""
        if self._always:
            return False
        if live is not self._value:
            return type(live) in PLAIN and type(live) is type(self._value) and bool(live == self._value)
        if self._parts is not None and type(live) is not tuple:
            parts = live if type(live) is list else _parts(live)
            if self._plain:  # the same objects are equal at once
                still = len(parts) == len(self._parts) and PLAIN.issuperset(map(type, parts))
                return still and [*parts] == self._parts
            return len(parts) == len(self._parts) and all(map(is_, parts, self._parts))
        if self._parts is not None:
            return True
        return self._first is None and _version(live) == self._version

    def _copy(self, live: Any, bounded: bool = True) -> Kept | None:
        found = self._pack(live, bounded)
        return None if found is None else [*map(_copied, found)]

    def _pack(self, live: Any, bounded: bool = True) -> Kept | None:
        if live is ABSENT:
            return []
        if self._read and live is self._value:
            return position(live)
        if self._is_holder(live):
            return [self._packing.pack([live])[0]]
        if isinstance(live, random.Random) and type(live) is not random.Random:
            return [packed(live.getstate())]
        if type(live) in _EXACT:
            return [self._packing.pack(live)]
        if bounded and not self._small(live):
            return None
        if (type(live) is np.ndarray and is_plain_array(live)) or (
            type(live) is torch.Tensor and is_plain_tensor(live)
        ):
            return [live]
        try:
            found = self._packing.pack(live)
        except SnapshotError:
            return None
        return [found] if not bounded or found is live or self._small(found) else None

    def _small(self, value: Any) -> bool:
        return _left(value, SMALL, self._packing._known.names, self._objects) >= 0

    def _is_holder(self, value: Any) -> bool:
        return id(value) in self._holders.names

    def _fixed(self, value: Any) -> bool:
        """Whether it is the same as long as it is the same object, or changes in places of its own."""
        if type(value) in PLAIN or isinstance(value, _NAMED) or value is ABSENT or self._is_holder(value):
            return not (self._read and value is self._value)
        return type(value) is tuple and len(value) <= _FEW and all(map(self._fixed, value))

    def _counts(self, live: Any) -> bool:
        """Whether batches may depend on it: a file that is opened when it is needed tells nothing, and what has gradients is the
        training's."""
        if isinstance(live, torch.Tensor) and (live.requires_grad or not live.is_cpu):
            return False
        if self._value is None or self._value is ABSENT:
            return isinstance(live, (*_FILLED, Iterator)) and not isinstance(live, (io.IOBase, np.memmap))
        return True


def _draws(value: Any) -> bool:
    return isinstance(value, GENERATORS) or (
        isinstance(value, (list, tuple, dict)) and len(value) <= _FEW and any(map(_draws, _parts(value)))
    )


def _is_plain(value: Any) -> bool:
    return type(value) in PLAIN or (type(value) is tuple and PLAIN.issuperset(map(type, value)))


def _parts(value: Any) -> list[Any]:
    kind = type(value)
    if kind in (list, tuple, deque):
        return [*value] if len(value) <= SMALL else []
    if kind in MAPPINGS:
        return [*value.keys(), *value.values()] if len(value) <= SMALL else []
    return []


def _version(value: Any) -> Any:
    """What tells that a value has changed which can't be kept; equal: nothing is seen."""
    if isinstance(value, Iterator):
        return progress(value)
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def _left(value: Any, room: int, known: Collection[int], objects: bool) -> int:
    """Of `room`, after all values in this one; less than 0: it is too large, or a tensor of the training's. What is known counts as one.
    objects: there may be some of any class."""
    kind = type(value)
    parts: Collection[Any] = ()
    if id(value) in known:
        return room - 1
    if kind is np.ndarray:
        return room - value.nbytes // 8
    if isinstance(value, torch.Tensor):
        ours = value.is_cpu and not value.requires_grad
        return room - value.numel() * value.element_size() // 8 if ours else -1
    if kind in MAPPINGS:
        parts = (*value.keys(), *value.values()) if len(value) <= room else range(room + 1)
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        parts = value
    elif is_c(kind):
        return room - 1 - size_of(value) // 8
    elif kind not in PLAIN:
        return room - _OBJECT if objects or kind in _SIMPLE or issubclass(kind, (Tagged, enum.Enum, *_NAMED)) else -1
    room -= max(1, len(parts))
    if room < 0 or PLAIN.issuperset(map(type, parts)):
        return room
    for part in parts:
        if (room := _left(part, room, known, objects)) < 0:
            break
    return room


def equal(one: Any, other: Any) -> bool:
    """Of packed values."""
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is np.ndarray:
        return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()
    if kind is torch.Tensor:
        return one.dtype == other.dtype and torch.equal(one, other)
    if kind in MAPPINGS:  # their order counts
        return equal([*one.items()], [*other.items()])
    try:
        return bool(one == other)
    except (ValueError, RuntimeError):  # arrays within
        return len(one) == len(other) and all(map(equal, one, other))


def _copied(value: Any) -> Any:
    """Of a packed value."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind in (list, tuple, Tagged):
        if PLAIN.issuperset(map(type, value)):
            return [*value] if kind is list else value
        return kind(map(_copied, value))
    return copy.deepcopy(value)
