"""A place whose value may change, and how the value is saved. A place is an attribute, a variable of a function, or a variable of a class.

A small value is saved as `state/values/packing.py` packs it. A value that is unchanged since the loop began is not saved: it may be a
setting, which the user may change before a restart.
"""

from __future__ import annotations

import copy
import enum
import io
import random
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from ...checkpoint.format.pytree import Tagged
from ...checkpoint.format.pytree_walk import PLAIN, is_plain
from ...resilience.errors import SnapshotError
from ..state.values.array_views import is_plain_array, is_plain_tensor
from ..state.values.ctypes_values import is_c, size_of
from ..state.values.packing import MAPPINGS
from ..state.values.type_adapters import CHANGELESS, CHANGING, packed, unpacked
from ..state.values.value_source import Known, Packed
from .checksums import Contents
from .iterator_progress import go_to, is_read, position, progress
from .shared_memory import within

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random, np.random.BitGenerator)
OF_THE_RANK = (random.random.__self__, np.random.rand.__self__, torch.default_generator)  # type: ignore[attr-defined]
_EXACT = frozenset(GENERATORS)
ABSENT = object()
"""Stands for the value of an empty place."""
_GONE = object()
"""Stands for a value whose reference was released."""
SMALL = 1 << 15
"""The most values in a list, or words in an array, including nested values, that are saved. All saved values are compared at each batch."""
_OBJECT = SMALL // 64
"""An object counts as this many values, because comparing it takes as long as comparing this many."""
_FEW = 256
"""The most values in a tuple that is searched."""
_SIMPLE = frozenset(each for kind in (*CHANGELESS, *CHANGING) for each in kind.types)
_NAMED = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, enum.Enum)
"""A place with a value of these types counts as unchanged while it holds the same object."""
_FILLED = (list, deque, set, np.ndarray, torch.Tensor, *MAPPINGS)
Kept = list[Any]
"""The saved state of a place: its packed value, or an empty list if the place is empty."""


class Place:
    def __init__(self, name: str, first: Any, holders: Known, objects: bool = True) -> None:
        """first: the value when the loop begins. holders: objects that have places of their own. objects: whether to save objects of any
        class."""
        self._name, self._value, self._holders = name, first, holders
        self._packing = Packed(name, holders)
        self._objects = objects
        self._read = is_read(first)
        self._hopeless = False
        """Whether the value has changed and can't be saved."""
        self.lost = False
        """Whether the value has changed and can't be saved, and batches may depend on it."""
        self._packed: list[Any] = []
        """The parts of the list that was last saved. None of these parts can change."""
        self._kept: Kept | None = None
        """The saved state of the list in `_packed`."""
        self._contents: Contents | None = None
        self._unchanged: Kept | None = None
        """The contents of the value that was packed last, and what `state` returned for it."""
        self._always = _draws(first)
        """Whether the value is saved even if unchanged. True for a generator, because a generator may have another seed after a restart."""
        self._parts = _parts(first) if all(map(self.is_fixed, _parts(first) or [first])) else None
        """The parts of a value in which no part itself can change, but only the choice and the order of the parts. None for any other
        value."""
        self._first = self._copy(first)
        """The packed value from when the loop began. None: it can't be saved."""
        self._ordered = False
        """Whether only the order of the value's parts is saved."""
        if self._first is None and 0 < len(_parts(first)) <= SMALL:
            self._name_parts(first)
        self._plain = self._parts is not None and all(map(is_plain, self._parts))
        self._version = _version(first)

    def _name_parts(self, first: Any) -> None:
        """Give names to the parts of a list, so that their order can be saved. Called for a list that is too large, or contains something
        that can't be packed."""
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
        """Return the saved state of the place's present value; None if nothing needs saving."""
        if self._same(live) or (self._hopeless and type(live) not in PLAIN):
            return None
        if type(live) is list and len(live) == len(self._packed) and all(map(is_, live, self._packed)):
            return self._kept
        contents = None if self._always or type(live) in PLAIN else Contents(live, SMALL)
        if contents and self._contents and contents.same(self._contents):
            return self._unchanged
        kept = self._pack(live)
        if kept is None:
            self._give_up(self._counts(live))
        elif self._read and kept == [None]:
            self.lost = True
        elif not self._always and self._first is not None and equal(kept, self._first):
            self._contents, self._unchanged = contents, None
            return None
        found = None if kept is None or isinstance(live, GENERATORS) else [*map(_copied, kept)]
        named = self._packing._known.names
        if type(live) is list and found and all(self.is_fixed(part) or id(part) in named for part in live):
            self._packed, self._kept = [*live], found
        if found:
            self._contents, self._unchanged = contents, found
        return found or kept

    def _give_up(self, lost: bool) -> None:
        self._hopeless, self.lost = True, lost
        if self._first is None or self._ordered:  # the value may be large
            self._value, self._first, self._parts = _GONE, None, None
            self._packing = Packed(self._name, self._holders)

    def saves(self, live: Any) -> bool:
        """Return whether snapshots contain the value, and not only the order of its parts."""
        return not (self._hopeless or self._ordered) and (live is not self._value or self._first is not None)

    def put_back(self, kept: Kept | None, live: Any) -> Any:
        """Return the value that the place must get: `live`, filled, if possible. kept: the saved state; None: the value from when the loop
        began."""
        if self._read and live is self._value:
            go_to(live, (self._first or []) if kept is None else kept)
            return live
        if kept is None:
            if self._same(live):
                return live
            if self._first is None:
                return live if self._value is _GONE else self._value
            if self._pack(live) is None:  # an open file, for example
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
        """Return whether the value is the same as when the loop began, as far as a fast check can tell."""
        if self._always:
            return False
        if live is not self._value:
            return type(live) in PLAIN and type(live) is type(self._value) and bool(live == self._value)
        if self._parts is not None and type(live) is not tuple:
            parts = live if type(live) is list else _parts(live)
            if self._plain:  # comparing an object with itself takes no time
                still = len(parts) == len(self._parts) and PLAIN.issuperset(map(type, parts))
                return still and [*parts] == self._parts
            return len(parts) == len(self._parts) and all(map(is_, parts, self._parts))
        if self._parts is not None:
            return True
        return self._first is None and _version(live) == self._version

    def _copy(self, live: Any, bounded: bool = True) -> Kept | None:
        found = self._pack(live, bounded)
        with suppress(RecursionError):
            return None if found is None else [*map(_copied, found)]
        return None

    def _pack(self, live: Any, bounded: bool = True) -> Kept | None:
        if live is ABSENT:
            return []
        if self._read and live is self._value:
            return position(live)
        if id(live) in self._holders.names:
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
        with suppress(RecursionError):  # the value contains itself, or is nested too deep
            return _left(value, SMALL, self._packing._known.names, self._objects) >= 0
        return False

    def is_fixed(self, value: Any) -> bool:
        """Return whether the value can't change while it is the same object, or changes only in places of its own."""
        if type(value) in PLAIN or isinstance(value, _NAMED) or value is ABSENT or id(value) in self._holders.names:
            return not (self._read and value is self._value)
        return type(value) is tuple and len(value) <= _FEW and all(map(self.is_fixed, value))

    def _counts(self, live: Any) -> bool:
        """Return whether batches may depend on the value. Batches do not depend on a file that is opened on demand. A tensor with
        gradients, or on a device, belongs to the training."""
        if isinstance(live, torch.Tensor) and (live.requires_grad or not live.is_cpu):
            return False
        if self._value is None or self._value is ABSENT:
            return isinstance(live, (*_FILLED, Iterator)) and not isinstance(live, (io.IOBase, np.memmap))
        return True


def _draws(value: Any) -> bool:
    return any(isinstance(each, GENERATORS) for each in within(value))


def _parts(value: Any) -> list[Any]:
    kind = type(value)
    if kind in (list, tuple, deque):
        return [*value] if len(value) <= SMALL else []
    if kind in MAPPINGS:
        return [*value.keys(), *value.values()] if len(value) <= SMALL else []
    return []


def _version(value: Any) -> Any:
    """Return a mark of a value that can't be saved. While the mark is equal, the value counts as unchanged."""
    if isinstance(value, Iterator):
        return progress(value)
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def _left(value: Any, room: int, known: Collection[int], objects: bool) -> int:
    """Return `room` minus the number of all values in this one. A negative result means: too large, or a tensor of the training. A known
    value counts as one value. objects: whether objects of any class are allowed."""
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
    """Return whether two packed values are equal."""
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is np.ndarray:
        return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()
    if kind is torch.Tensor:
        return one.dtype == other.dtype and torch.equal(one, other)
    if kind in MAPPINGS:  # the order of the keys matters
        return equal([*one.items()], [*other.items()])
    try:
        return bool(one == other)
    except (ValueError, RuntimeError):  # the values contain arrays
        return len(one) == len(other) and all(map(equal, one, other))


def _copied(value: Any) -> Any:
    """Return a copy of a packed value."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind in (list, tuple, Tagged):
        if PLAIN.issuperset(map(type, value)):
            return [*value] if kind is list else value
        return kind(map(_copied, value))
    return copy.deepcopy(value)
