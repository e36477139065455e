"""Third-party objects in attributes of modules: an argparse.Namespace, a config, a scaler.

Most of these objects never change, and a restart recreates them. So the rank records each object's parts when the loop begins, and compares
them at each snapshot. The snapshot stores only the objects that have changed. The rank does not watch an object with too many parts.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from operator import is_
from typing import Any

import numpy as np
import torch

from ....checkpoint.format.pytree_walk import PLAIN
from ....resilience.errors import SnapshotError
from ..values.array_views import TENSORS
from ..values.class_adapters import ENUM, GLOBAL, VALUE, kind_of
from ..values.kind import class_of, is_source, slot_values, slots_of
from ..values.type_adapters import CHANGELESS, CHANGING, DTYPE, NUMPY_SCALAR
from ..values.value_source import Packed
from .attribute_rules import FRAMEWORKS, WRAPPERS

_MOST = 2000
"""The most parts of all such objects of a model together. Comparing this many parts takes 1 ms at each snapshot."""
_MOST_BYTES = 1 << 24
"""The most bytes of arrays and tensors in one object. The rank keeps a copy of their first contents."""
_FLAT = 10
"""The number of attributes with constant values that can be compared in the time that one part takes."""
_OTHERS = frozenset((*FRAMEWORKS, *WRAPPERS, "mt_resilient", "logging"))
_PLAIN = (
    "torch.quasirandom",
    "torch.distributions",
    "lightning_utilities",
    "lightning.fabric.utilities.data",
    "lightning_fabric.utilities.data",
    "lightning.pytorch.utilities.parsing",
    "pytorch_lightning.utilities.parsing",
)
"""Modules whose objects count as values: distributions; `AttributeDict`, the hyperparameters of a LightningModule."""
_FIXED = frozenset(map(id, (*CHANGELESS, DTYPE, ENUM, GLOBAL, NUMPY_SCALAR, VALUE)))
_CHANGING = frozenset(map(id, CHANGING))
"""The ids of the adapters for objects that may change."""
_CONTAINERS = (dict, list, tuple)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState)
_MADE_IN_PYTHON = 1 << 9
"""Py_TPFLAGS_HEAPTYPE. The built-in types, such as those of functions and modules, lack this flag."""


@cache
def is_foreign(kind: Any) -> bool:
    """Whether objects of this type can be watched for changes. Objects of torch and of frameworks can't: they belong to one process."""
    module = kind.__module__
    if isinstance(kind, type) and issubclass(kind, (torch.nn.Module, torch.optim.Optimizer, torch.Tensor, np.ndarray)):
        return False
    if (module.partition(".")[0] in _OTHERS and not module.startswith(_PLAIN)) or hasattr(kind, "__del__"):
        return False
    return _has_attributes(kind)


class TooMany(Exception):
    """An object has too many parts."""


def parts_of(thing: Any, room: int, most_bytes: int = _MOST_BYTES) -> list[Any]:
    """Return all parts of a value, so that `alike` can find out whether the value has changed. Raises any error that reading the value
    raises. Raises TooMany if the value has more than `room` parts, or arrays and tensors of more than `most_bytes`."""
    found: list[Any] = []
    seen: set[int] = set()
    size = 0
    made = False  # whether the tensors were created only for this comparison. Then their contents are compared

    def down(value: Any) -> None:
        nonlocal size, made
        kind: Any = type(value)
        if len(found) > room:
            raise TooMany
        found.append(kind)
        if kind in PLAIN:
            found.append(value)
            return
        if id(value) in seen:
            return
        seen.add(id(value))
        if kind is np.ndarray and value.dtype.hasobject:
            found.extend(value.shape)
            for each in value.flat:
                down(each)
            return
        if kind in TENSORS or kind is np.ndarray:
            size += value.nbytes
            if size > most_bytes:
                raise TooMany
            if made or kind is np.ndarray:
                found.append(bytes(np.asarray(value).tobytes()))
            else:
                found.extend((weakref.ref(value), _version(value)))
            return
        known = kind_of(kind)
        if known is not None and id(known) in _CHANGING:
            before, made = made, made or isinstance(value, _GENERATORS)
            down(known.save(value))
            made = before
            return
        if isinstance(value, _CONTAINERS):
            items(value)
        if slots := slot_values(value):
            down(slots)
        if _has_attributes(kind) and hasattr(value, "__dict__"):
            down(vars(value))
        elif not slots and not isinstance(value, _CONTAINERS):
            found.append(value)

    def items(value: Any) -> None:
        """Add the items that Python's own class returns: an overridden method may return other objects, as in a Box of python-box."""
        found.append(len(value))
        if isinstance(value, dict):
            for key, each in [*dict.items(value)]:
                found.append(key)
                down(each)
        else:
            for each in [*(list if isinstance(value, list) else tuple).__iter__(value)]:
                down(each)

    down(thing)
    return found


def alike(began: Sequence[Any], now: Sequence[Any]) -> bool:
    """Whether the value is unchanged: its parts when the loop began equal its parts now."""
    return len(began) == len(now) and all(map(_alike, began, now))


class Foreign:
    """One third-party object, as it was when the loop began."""

    def __init__(self, thing: Any, room: int) -> None:
        """room: the most parts that the object may have. Raises TooMany, and any error that reading the object raises."""
        self.thing, self._room = thing, room
        values = list(getattr(thing, "__dict__", {}).values())
        only = hasattr(thing, "__dict__") and not isinstance(thing, _CONTAINERS) and not slot_values(thing)
        flat = only and all(map(_never_changes, values))
        self._flat = (list(vars(thing)), values) if flat else None
        self.parts = 1 + len(values) // _FLAT
        self._began: list[Any] = []
        if self.parts > room:
            raise TooMany
        if self._flat is None:
            self._began = parts_of(thing, room)
            self.parts += len(self._began)
        self._packed: Any = None

    def freeze(self, packed: Packed) -> None:
        """Keep a separate copy of the object's present contents. Raises SnapshotError if the object can't be packed."""
        if self._flat is None:
            self._packed = [copy.deepcopy(packed.pack(self.thing))]

    def has_changed(self) -> bool:
        try:
            if self._flat is None:
                return not alike(self._began, parts_of(self.thing, self._room))
            held, (keys, values) = vars(self.thing), self._flat
            return not (len(held) == len(keys) and [*held] == keys and all(map(is_, held.values(), values)))
        except Exception:  # too many parts; a file that is closed; another thread that writes to it
            return True

    def put_back(self, packed: Packed) -> None:
        """Restore the object's contents from when the loop began."""
        if self._flat is not None and self.has_changed():
            vars(self.thing).clear()
            vars(self.thing).update(zip(*self._flat, strict=True))
        elif self._packed and self.has_changed():
            packed.unpack(copy.deepcopy(self._packed[0]), self.thing)


class Foreigners:
    """The third-party objects in the modules of a model."""

    def __init__(self, packed: Callable[[str], Packed]) -> None:
        """packed: a function that returns the packer for an object, given the object's name."""
        self._packed = packed
        self._known: dict[int, Foreign | None] = {}
        """The watched objects, by id. None stands for an object that is not watched."""
        self._held: list[Any] = []
        """References to all known objects, so that no other object can get one of their ids."""
        self._room = _MOST
        self.changed: frozenset[int] = frozenset()
        """The ids of the objects that the last comparison found changed since the loop began."""

    def begin(self, thing: Any, called: str) -> None:
        if id(thing) in self._known:
            return
        self._held.append(thing)
        self._known[id(thing)] = None
        try:
            made = Foreign(thing, self._room)
        except Exception:  # too many parts, or an error that a third-party class raises
            return
        self._room -= made.parts
        self._known[id(thing)] = made
        if not is_source(class_of(thing)):
            try:
                made.freeze(self._packed(called))
            except Exception:  # for example, a lock inside the object. If the object changes, the rank reports that
                return

    def against(self, thing: Any) -> str:
        """Return the reason why the object is too large for a snapshot; empty if it is not."""
        known = self._known.get(id(thing))
        try:
            known or Foreign(thing, _MOST)
        except TooMany:
            return "it holds too many parts, or too large ones. Give it to the Session"
        return ""

    def packs(self, thing: Any) -> bool:
        """Whether a snapshot can store the object."""
        try:
            self._packed("").pack(thing)
        except SnapshotError:
            return False
        return True

    def look(self) -> bool:
        """Compare all objects again. Return whether the set of changed objects differs from that of the last comparison."""
        now = frozenset(each for each, known in self._known.items() if known is not None and known.has_changed())
        before, self.changed = self.changed, now
        return before != now

    def put_back(self, but: set[int]) -> None:
        """Restore the contents that all objects had when the loop began, except for objects whose ids are in `but`."""
        for known in self._known.values():
            if known is not None and id(known.thing) not in but:
                known.put_back(self._packed(class_of(known.thing).__qualname__))


def _never_changes(value: Any) -> bool:
    kind = class_of(value)
    if isinstance(value, tuple):
        return PLAIN.issuperset(map(type, value))
    return kind in PLAIN or id(kind_of(kind)) in _FIXED


@cache
def _has_attributes(kind: Any) -> bool:
    """Whether objects of this type consist of attributes."""
    known = kind_of(kind)
    if is_source(kind):
        return not issubclass(kind, (torch.nn.Module, torch.optim.Optimizer)) and bool(kind.__dictoffset__)
    if known is None:  # a class without an adapter defines how it is copied, as the classes of sortedcontainers do
        return _has_any(kind) and bool(kind.__flags__ & _MADE_IN_PYTHON)
    return id(known) not in _FIXED | _CHANGING and _has_any(kind)


def _has_any(kind: Any) -> bool:
    return bool(kind.__dictoffset__ or slots_of(kind))


def _alike(began: Any, now: Any) -> bool:
    if began is now:
        return True
    if type(began) is weakref.ref:
        return type(now) is weakref.ref and began() is now() is not None
    return type(began) in PLAIN and type(began) is type(now) and bool(began == now)


def _version(tensor: Any) -> int:
    return -1 if tensor.is_inference() else int(tensor._version)
