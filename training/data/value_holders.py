"""Holders: the objects, functions and classes of a data loader with places (attributes and variables) for values. `loader_state.py` finds
them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from operator import is_
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ...checkpoint.format.pytree_walk import PLAIN
from ..state.values.kind import slots_of
from ..state.values.packing import MAPPINGS
from ..state.values.value_source import Known
from .held_values import ABSENT, GENERATORS, Kept, Place
from .iterator_progress import is_read
from .script_code import Named, is_own
from .shared_memory import is_counter, is_shared

_VALUES = frozenset((list, tuple, set, deque, np.ndarray, torch.Tensor, *MAPPINGS))
"""Types of module variables that are restored, besides plain values and generators. Other objects in module variables may also be used
outside the loader."""
_DEFAULTS = ("__defaults__", "__kwdefaults__")


class Holder:
    """An object with places, which are its attributes."""

    def __init__(self, name: str, thing: Any, holders: Known, whole: bool, told: bool) -> None:
        """whole: save all values, not only the generators. told: whether the object is the script's own. If the object is the script's own,
        objects of any class in it are saved, and values that can't be restored are reported."""
        self.name, self.thing = name, thing
        self._holders, self.whole, self.told = holders, whole, told
        self._places: dict[str, Place] = {}
        self._last: dict[str, Any] = {}
        """The last values of all places, if each value counts as unchanged while it is the same object; otherwise empty."""
        self.lost: list[tuple[str, int]] = []
        """The names and ids of values that have changed and can't be restored. A value itself may be large, and is not kept alive."""
        self.reads = True
        """Whether the holder's open files belong to this process. If workers read the files, all processes share one file position, so it
        is not restored."""

    def live(self) -> dict[str, Any]:
        found = getattr(self.thing, "__dict__", {})
        kind: Any = type(self.thing)
        if slots := slots_of(kind):
            found = {**found, **{name: getattr(self.thing, name) for name in slots if hasattr(self.thing, name)}}
        return found

    def put(self, name: str, value: Any) -> None:
        object.__setattr__(self.thing, name, value)

    def drop(self, name: str) -> None:
        object.__delattr__(self.thing, name)

    def begin(self) -> None:
        """Record the present values as those of the loop's beginning. Call this when all holders are known."""
        self._places = {
            name: Place(self._called(name), value, self._holders, self.told) for name, value in self._looked_at()
        }

    def _called(self, name: str) -> str:
        return f"{self.name}.{name}" if self.name else name

    def _looked_at(self) -> list[tuple[str, Any]]:
        in_worker = get_worker_info() is not None
        return [
            (name, value)
            for name, value in self.live().items()
            if (self.whole or isinstance(value, GENERATORS))
            and not isinstance(value, _BaseDataLoaderIter)
            and not (name == "_iterator" and isinstance(self.thing, DataLoader))
            and not (in_worker and is_shared(value))
            and (self.reads or not is_read(value))
        ]

    def shared(self) -> Iterator[tuple[str, Any]]:
        """Yield counters and similar small values that several processes share, each with its name."""
        yield from ((self._called(name), value) for name, value in self.live().items() if is_counter(value))

    def values(self) -> Iterator[Any]:
        yield from (value for _, value in self._looked_at())

    def saved(self) -> Iterator[Any]:
        """Yield the values that snapshots contain, or whose changes are reported. An object with places of its own is not one of them."""
        for name, value in self._looked_at():
            place = self._places.get(name)
            saved = type(value) in _VALUES if place is None else place.lost or place.saves(value)
            if saved and id(value) not in self._holders.names:
                yield value

    def collect(self) -> dict[str, Kept]:
        live = self.live()
        if len(live) == len(self._last) and all(map(is_, live.values(), self._last.values())):
            return {}
        found, calm = {}, True
        held = dict(self._looked_at())
        for name in [*held, *(self._places.keys() - live.keys())]:
            place = self._place(name)
            value = held.get(name, ABSENT)
            before = place.lost
            kept = place.state(value)
            if kept is not None:
                found[name] = kept
            if place.lost and not before and self.told:
                self.lost.append((self._called(name), id(value)))
            calm = calm and kept is None and place.is_fixed(value)
        self._last = dict(live) if calm else {}
        return found

    def _place(self, name: str) -> Place:
        if name not in self._places:
            self._places[name] = Place(self._called(name), ABSENT, self._holders, self.told)
        return self._places[name]

    def restore(self, kept: Mapping[str, Kept]) -> None:
        held = dict(self._looked_at())
        others = self.live().keys() - held.keys()
        """Attributes that are not saved, such as a new iterator of torch's."""
        for name in dict.fromkeys((*held, *self._places, *kept)):
            if name in others:
                continue
            live = held.get(name, ABSENT)
            value = self._place(name).put_back(kept.get(name), live)
            if value is live:
                continue
            if value is ABSENT:
                self.drop(name)
            else:
                self.put(name, value)


class Given(Holder):
    """The objects with which the search began (they may include lists), or the arguments of a functools.partial."""

    def live(self) -> dict[str, Any]:
        return dict(self.thing)

    def put(self, name: str, value: Any) -> None:
        pass

    drop = put  # type: ignore[assignment]


class Bag(Holder):
    """An object of a library's class that consists only of attributes, all set by the script."""

    def put(self, name: str, value: Any) -> None:
        vars(self.thing)[name] = value

    def drop(self, name: str) -> None:
        del vars(self.thing)[name]


class Variables(Holder):
    """Variables that a function takes from enclosing functions. For a function of the script, also the module variables to which it refers,
    and its attributes."""

    def __init__(self, name: str, thing: Any, holders: Known, names: list[Named], told: bool) -> None:
        super().__init__(name, thing, holders, whole=True, told=told)
        self._cells = dict(zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True))
        self._named = {each.label: each for each in names if each.label not in self._cells}
        self._objects = {label for label, each in self._named.items() if is_own(each.value)}

    @property
    def holds(self) -> bool:
        """Whether the function has a place, or may get one for a variable that does not exist yet."""
        return bool(self.live()) or any(each.name not in each.around for each in self._named.values())

    def live(self) -> dict[str, Any]:
        found: dict[str, Any] = {name: value for name in _DEFAULTS if (value := getattr(self.thing, name))}
        for label, each in self._named.items():
            value = each.around.get(each.name, ABSENT)
            if value is not ABSENT and (_is_value(value) or label in self._objects or label in self._places):
                found[label] = value
        for name, cell in self._cells.items():
            try:
                found[name] = cell.cell_contents
            except ValueError:  # the variable is not assigned yet
                continue
        if self.told and self.thing.__dict__:
            found |= {self._attribute(name): value for name, value in vars(self.thing).items()}
        return found

    def _attribute(self, name: str) -> str:
        """Return the name for an attribute of the function itself. No variable can have this name."""
        return f"{self.thing.__name__}().{name}"

    def put(self, name: str, value: Any) -> None:
        if name in _DEFAULTS:
            setattr(self.thing, name, value)
        elif name in self._cells:
            self._cells[name].cell_contents = value
        elif each := self._named.get(name):
            each.around[each.name] = value
        else:
            setattr(self.thing, name.rpartition(".")[2], value)

    def drop(self, name: str) -> None:
        if name in self._cells:
            del self._cells[name].cell_contents
        elif each := self._named.get(name):
            del each.around[each.name]
        elif name not in _DEFAULTS:
            delattr(self.thing, name.rpartition(".")[2])


class OfClass(Holder):
    """Values of a class of the script that all its objects share."""

    def __init__(self, name: str, thing: Any, holders: Known, whole: bool, told: bool) -> None:
        super().__init__(name, thing, holders, whole, told)
        self._objects = {name for name, value in vars(thing).items() if is_own(value)}
        self._names: list[str] = []
        self._count = -1
        """The number of attributes that the class had when `_names` was computed. Most are methods, so they are not checked each time."""

    def live(self) -> dict[str, Any]:
        attributes = vars(self.thing)
        if len(attributes) != self._count:
            self._count = len(attributes)
            named = {name: value for name, value in attributes.items() if not name.startswith("__")}
            placed = self._objects | self._places.keys()
            self._names = [name for name, value in named.items() if name in placed or _is_value(value)]
        return {name: attributes[name] for name in self._names if name in attributes}

    def put(self, name: str, value: Any) -> None:
        setattr(self.thing, name, value)
        self._count = -1

    def drop(self, name: str) -> None:
        delattr(self.thing, name)
        self._count = -1


def _is_value(thing: Any) -> bool:
    return type(thing) in PLAIN or type(thing) in _VALUES or isinstance(thing, GENERATORS)
