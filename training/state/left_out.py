"""Attributes of a script's object that its own `state_dict` may leave out: a count of steps, the last ten losses.

The object's `load_state_dict` restores the object first. After that, each attribute that `load_state_dict` has not changed gets its value
from the snapshot. An attribute that `load_state_dict` changes keeps its new value. If the snapshot has another value for it, the rank
reports that.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from ...checkpoint.format.pytree import Tagged
from ...checkpoint.format.pytree_walk import is_plain
from ...resilience.errors import SnapshotError
from ..warm.side_effects import is_scripts
from .modules.attribute_rules import same
from .modules.attribute_sources import is_own_object, own_attributes, sources_in
from .modules.foreign_objects import alike, is_foreign, parts_of
from .modules.unsaved_parts import Reports, note
from .tensors.in_place import Nested
from .values.class_adapters import ENUM, VALUE, kind_of
from .values.kind import is_source
from .values.packing import MAPPINGS
from .values.type_adapters import CHANGELESS, CHANGING, DTYPE, NUMPY_SCALAR, RETURNED
from .values.unpacking import difference, merged
from .values.value_source import Known, Packed, Stateful

_MOST = 2000
"""The most parts of an attribute that is compared. A longer list is assumed to be data."""
_MOST_BYTES = 1 << 20
"""The most bytes in the tensors and arrays of an attribute that is compared."""
_GONE = ""
"""The key in a snapshot's attributes under which the names of deleted attributes are listed."""
_FILLED = (list, np.ndarray, torch.Tensor, *MAPPINGS)
_KNOWN = frozenset(map(id, (*CHANGING, *CHANGELESS, DTYPE, ENUM, NUMPY_SCALAR, RETURNED, VALUE)))
"""The ids of the adapters whose values may be state."""


def may_leave_out(thing: Any) -> bool:
    """Whether an object's `state_dict` may leave out attributes that need saving. A scheduler that inherits torch's `state_dict` leaves
    nothing out. Objects of frameworks are skipped, and so are objects of other libraries that yield batches."""
    kind: Any = type(thing)
    if kind.state_dict is torch.optim.lr_scheduler.LRScheduler.state_dict:
        return False
    return is_scripts(kind.__module__) or (is_foreign(kind) and not hasattr(kind, "__iter__"))


class _Load(NamedTuple):
    """What one call of `load_state_dict` has done."""

    state: Any
    now: Mapping[str, Any]
    """The attributes after the call."""
    free: set[str]
    """Names of the attributes that the call has not changed."""
    fresh: Mapping[str, Nested]
    """Packed attributes from before the call."""
    loaded: Mapping[str, Nested]
    """The attributes in `fresh` that are still the same objects, packed again after the call."""

    def may_set(self, name: str) -> bool:
        """Whether a restore may give the attribute a value of its own."""
        return name in self.free or name in self.loaded or name not in self.now

    def merged(self, name: str, packed: Any) -> Any:
        return merged(self.fresh.get(name), self.loaded.get(name), packed)


class Declared(Stateful):
    """An object of the script with `state_dict` and `load_state_dict`."""

    def __init__(self, name: str, thing: Any, known: Known) -> None:
        super().__init__(name, thing, known)
        self._stays: dict[str, Any] = {}
        """Parts that no snapshot contains, because each start creates them again."""
        self._beside = Packed(name, Known(known.lenders, self._stays))
        self._begun = False
        """Whether the training loop has begun. The next four fields describe the attributes at that moment."""
        self._plain: dict[str, Any] = {}
        """Numbers and texts, by attribute name."""
        self._looks: dict[str, list[Any]] = {}
        """The parts of all other values, by attribute name."""
        self._copies: dict[str, Any] = {}
        """Packed copies of the values in `_looks`, by attribute name."""
        self._alone: set[str] = set()
        """Names of those values in `_looks` that share nothing with other objects of the Session."""
        self._large: set[str] = set()
        """Names of attributes that are too large or can't be read, and are not read again."""
        self._proved: set[tuple[str, type]] = set()
        """Names and types of attributes for which a trial proved that they are restored unchanged."""
        self._reports = Reports()

    def held(self) -> Iterator[tuple[str, Any]]:
        """Yield models and other objects with a state of their own, found in this object's attributes and in the script's objects there."""
        held = own_attributes(self.thing)
        found = ((name, *each) for name, value in held.items() for each in sources_in(value))
        return ((".".join(map(str, (name, *keys))), thing) for name, keys, thing in found)

    @property
    def writes(self) -> bool:
        """Whether the object's `load_state_dict` may write into a model."""
        return any(isinstance(each, torch.nn.Module) for _, each in self.held())

    def collect(self) -> Any:
        self._begin()
        said = self._state()
        packed = self.pack(said)
        try:
            beside = self._collect_beside(said)
        except SnapshotError:  # a value has changed to one that can't be saved
            self._proved.clear()
            beside = self._collect_beside(said)
        return Tagged(("", [packed, beside])) if beside else packed

    def _collect_beside(self, said: Any) -> Nested:
        named = said if isinstance(said, Mapping) else {}
        now = own_attributes(self.thing)
        found = {name: value for name, value in self._now().items() if self._is_beside(name, value, named)}
        kept: dict[str, Any] = dict(self._beside.pack(found)) if found else {}
        if gone := [name for name in (*self._plain, *self._looks) if name not in now]:
            kept[_GONE] = gone
        return kept

    def prove(self, kept: Any) -> None:
        super().prove(kept[1][0] if _has_more(kept) else kept)

    def restore(self, kept: Any) -> None:
        self._begin()
        said, told = kept[1] if _has_more(kept) else (kept, {})
        told, gone = {name: each for name, each in told.items() if name != _GONE}, frozenset(told.get(_GONE, ()))
        load = self._load_as_at_first(said)
        beside = self._unpack_beside(load, told, gone)
        state = load.state if isinstance(load.state, Mapping) else {}
        named = {name: state[name] for name in self._plain if name in state}
        values = {name: value for name, value in {**self._plain, **named, **beside}.items() if name not in gone}
        for name, value in values.items():
            if name in load.free or name not in load.now or (name in beside and not is_plain(value)):
                self._set(name, value)
            elif is_plain(value) and not _same(load.now, name, value):
                sets = "its load_state_dict sets this value, but the training had another one"
                self._say(name, f"is {load.now[name]!r:.40} now: {sets}")
        for name in load.free - values.keys():
            if name in gone or name not in self._looks:  # it was added after the snapshot
                object.__delattr__(self.thing, name)
        self._compare(told)

    def _load_as_at_first(self, said: Any) -> _Load:
        """Give the attributes the values that they would have after a restart, and then call `load_state_dict`."""
        for name in self._now().keys() & self._plain.keys():
            self._set(name, self._plain[name])
        before = self._now()
        looks = {name: self._look(name, value) for name, value in before.items() if not is_plain(value)}
        fresh = copy.deepcopy(self._packed(self._alone))
        state = self.unpack(said, None)
        self._load(state)
        now = self._now()
        free = {name for name in before if name in now and self._is_still(name, before, looks, now)}
        return _Load(state, now, free, fresh, self._packed({name for name in fresh if now.get(name) is before[name]}))

    def _unpack_beside(self, load: _Load, told: Mapping[str, Any], gone: frozenset[str]) -> dict[str, Any]:
        """Return the values that the snapshot stores next to the `state_dict`. Also return the values from the loop's beginning for
        attributes that have changed since and that the snapshot does not mention."""
        begun = {name for name in self._copies.keys() - told.keys() - gone if self._has_changed(name, load.now)}
        wanted = {name: load.merged(name, each) for name, each in told.items() if load.may_set(name)}
        found: dict[str, Any] = self._beside.unpack(wanted, {n: load.now[n] for n in wanted if n in load.now})
        for name in filter(load.may_set, begun):
            first = load.merged(name, copy.deepcopy(self._copies[name]))
            found[name] = self._beside.unpack(first, load.now.get(name))
        return found

    def _has_changed(self, name: str, now: Mapping[str, Any]) -> bool:
        return name not in now or is_plain(now[name]) or not alike(self._looks[name], self._look(name, now[name]) or ())

    def _apart(self) -> Packed:
        """Return a packer for values that refer to no object of the Session except this one."""
        known = Known(stays=self._stays)
        known.add(self._name, self.thing)
        return Packed(self._name, known)

    def _packed(self, names: Collection[str]) -> dict[str, Nested]:
        """Return the named attributes, packed as they are now. Attributes that refer to other objects of the Session are left out."""
        found, now = {}, self._now()
        for name in names & now.keys():
            with suppress(SnapshotError):
                found[name] = self._apart().pack(now[name])
        return found

    def _compare(self, told: Mapping[str, Any]) -> None:
        """Report the first attribute that differs from the snapshot."""
        now = {**self._now(), **{name: value for name, value in told.items() if is_plain(value)}}
        try:
            again = self._beside.pack({name: now[name] for name in told if name in now})
        except SnapshotError:
            return
        for name in told:
            if where := difference(told[name], again.get(name), f"{self._name}.{name}"):
                self._say(name, f"differs from its value in the snapshot: its load_state_dict sets it ({where})")
                return  # later differences may only come from shifted reference numbers

    # -- attributes -------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        now = self._now()
        note(self._stays, self._name, now)
        for name, value in now.items():
            if is_plain(value):
                self._plain[name] = value
            elif (look := self._look(name, value)) is not None:
                self._looks[name] = look
                with suppress(SnapshotError):
                    packed = self._beside.pack(value)
                    self._copies[name] = copy.deepcopy(packed)
                    if not difference(self._apart().pack(value), packed, name):
                        self._alone.add(name)

    def _now(self) -> dict[str, Any]:
        """Return the attributes that may be training state."""
        return {
            name: value for name, value in own_attributes(self.thing).items() if is_plain(value) or self._is_open(value)
        }

    def _is_open(self, value: Any) -> bool:
        kind: Any = type(value)
        if id(value) in self._known.names or is_source(kind):
            return False
        if isinstance(value, torch.Tensor):
            return kind is torch.Tensor and not value.requires_grad
        return kind in _FILLED or id(kind_of(kind)) in _KNOWN or is_own_object(value)

    def _is_beside(self, name: str, value: Any, named: Mapping[Any, Any]) -> bool:
        """Whether the snapshot stores the attribute next to the `state_dict`."""
        if is_plain(value):
            return not _same(named, name, value) and (name in named or not _same(self._plain, name, value))
        look = self._look(name, value)
        if look is None and name in self._looks:
            self._say(name, "has become too large to be saved next to its state_dict. A recovery does not restore it")
        if look is None or (name in self._looks and alike(self._looks[name], look)):
            return False
        if (name, type(value)) not in self._proved:
            called = f"{self._name}.{name}"
            if why := self._beside.why_not(value, called):
                self._reports.not_kept(name, called, why)
                return False
            self._proved.add((name, type(value)))
        return True

    def _look(self, name: str, value: Any) -> list[Any] | None:
        """Return the parts of an attribute's value. None if it has too many parts, or can't be read."""
        if name in self._large:
            return None
        try:
            return parts_of(value, _MOST, _MOST_BYTES)
        except Exception:
            self._large.add(name)
            return None

    def _is_still(
        self, name: str, before: Mapping[str, Any], looks: Mapping[str, list[Any] | None], now: Mapping[str, Any]
    ) -> bool:
        if name not in looks:
            return is_plain(now[name]) and _same(before, name, now[name])
        was, look = looks[name], None if is_plain(now[name]) else self._look(name, now[name])
        return now[name] is before[name] and was is not None and look is not None and alike(was, look)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self.thing, name, value)  # a class may define its own `__setattr__`, as a wrapper does

    def _say(self, name: str, what: str) -> None:
        self._reports.say(name, f"{self._name}.{name} {what}")


def _has_more(kept: Any) -> bool:
    return type(kept) is Tagged and kept[0] == ""


def _same(held: Mapping[Any, Any], name: str, value: Any) -> bool:
    return name in held and same(held[name], value)
