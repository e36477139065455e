"""The state of a data loader that changes as it runs: its random generators, its counters, and values that it shuffles, fills or creates on
demand.

The loader and all its parts are searched: datasets, samplers, transforms, and everything to which their functions and methods refer.
"""

from __future__ import annotations

import enum
import functools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import islice
from types import BuiltinMethodType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from ...checkpoint.format.pytree_walk import PLAIN
from ..state.values.ctypes_values import is_c
from ..state.values.kind import slots_of
from ..state.values.value_source import Known
from .held_values import GENERATORS, OF_THE_RANK, equal
from .script_code import BAGS, Named, apart, installed, is_own, methods, names_of, of_script
from .shared_memory import bytes_of
from .value_holders import Bag, Given, Holder, OfClass, Variables

_HOLDERS = 1024
"""The most objects that are searched. A loader or dataset may refer to any number of objects."""
_FEW = 64
"""A list of at most this many parts is searched completely. Of a longer list, only parts are searched that give samples, can be called, or
draw random numbers. The other parts of such a list are data."""
_ENDS = 1024
"""The most parts at either end of a list or mapping that are looked at. A dataset may list millions of samples, and looking at them would
copy their memory pages in each worker."""
_NO_STATE = (enum.Enum, BaseException, torch.nn.Module)
"""Classes to which code refers for a reason other than their values. (A module that is used as a transform is found separately.)"""
_VALUES = (list, dict, set, deque)
_DATA = frozenset((*_VALUES, tuple, np.ndarray, torch.Tensor))
_CALLING = type(iter(int, 1))


class Own:
    """The changing state of `holders` and all their parts, under names that a restart does not change."""

    def __init__(self, stateful: bool = False, /, **holders: Any) -> None:
        """stateful: an object with a `state_dict` is restored by its own `load_state_dict`, unless the script wrote its class."""
        self._stateful = stateful
        self._known = Known()
        self.holders: list[Holder] = []
        self.is_given: Callable[[int], bool] = lambda _: False
        """Whether the Session was given the object with this id, or something that contains it. The Session restores it in any case."""
        self._names: set[str] = set()
        self._seen: dict[int, Any] = {}
        self._claimed: set[tuple[int, str]] = set()
        """Module variables that already have a place (`held_values.py`). Several functions may refer to the same variable."""
        self._shared: list[tuple[str, Any]] | None = None
        self._functions = 0
        """The number of functions whose code was read, including functions without a place."""
        todo = deque(holders.items())
        if holders:
            self._hold(Given("", holders, self._known, whole=True, told=True))
        while todo and len(self.holders) < _HOLDERS:
            name, thing = todo.popleft()
            if id(thing) in self._seen or type(thing) in PLAIN or isinstance(thing, (ModuleType, *GENERATORS)):
                continue
            self._seen[id(thing)] = thing
            todo += ((f"{name}.{at}", part) for at, part in self._look(name, thing))
        self._seen.clear()
        reads = not any(isinstance(each, DataLoader) and each.num_workers for each in self.things())
        for holder in self.holders:
            holder.reads = reads
            holder.begin()

    def _hold(self, holder: Holder) -> None:
        while holder.name in self._names:
            holder.name += "~"
        self._names.add(holder.name)
        self.holders.append(holder)

    def values(self) -> list[Any]:
        return [value for holder in self.holders[1:] for value in holder.values()]

    def things(self) -> list[Any]:
        """Return all objects that have places."""
        return [holder.thing for holder in self.holders]

    def collect(self) -> dict[str, Any]:
        return {holder.name: kept for holder in self.holders if (kept := holder.collect())}

    def restore(self, kept: Mapping[str, Any]) -> None:
        for holder in self.holders:
            holder.restore(kept.get(holder.name, {}))

    def loaded(self, load: Callable[[], None]) -> set[tuple[str, str]]:
        """Call `load`, a loader's own `load_state_dict`. Return the places that `load` has set, each with its holder. A place that `load`
        has set may tell the loader where its next pass begins."""
        before = self.collect()
        load()
        after = self.collect()
        every = {(holder, place) for each in (before, after) for holder, places in each.items() for place in places}
        held = {
            (holder, place): [each.get(holder, {}).get(place) for each in (before, after)] for holder, place in every
        }
        return {place for place, both in held.items() if not equal(*both)}

    def restore_but(self, kept: Mapping[str, Any], places: Collection[tuple[str, str]]) -> None:
        """Restore `kept`, except for these places."""
        now = self.collect() if places else {}
        wanted = {holder: dict(each) for holder, each in kept.items()}
        for holder, place in places:
            wanted.setdefault(holder, {}).pop(place, None)
            if place in now.get(holder, {}):
                wanted[holder][place] = now[holder][place]
        self.restore(wanted)

    def shared(self) -> dict[str, bytes]:
        """Return the bytes of the small values that several processes share, by name. Values created after the first call are not
        included."""
        if self._shared is None:
            self._shared = [each for holder in self.holders for each in holder.shared()]
        return {name: bytes_of(value) for name, value in self._shared}

    def loaders_inside(self) -> list[Any]:
        """Return the DataLoaders from which the loader takes its batches. A DataLoader inside an object that gives no samples (a trainer)
        is left out, because it may serve another purpose."""
        inside = {holder.name: holder.thing for holder in self.holders if holder.name.startswith("loader")}
        return [
            thing
            for name, thing in inside.items()
            if isinstance(thing, DataLoader) and all(map(_gives, _around(name, inside)))
        ]

    def lost(self) -> list[str]:
        """Return the names of values that have changed since the last call and can't be restored."""
        found = [name for holder in self.holders for name, known in holder.lost if not self.is_given(known)]
        for holder in self.holders:
            holder.lost.clear()
        return found

    def _look(self, name: str, thing: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the parts of the object. If the object has places, also add the object to the holders."""
        match thing:
            case list() | tuple() | deque():
                yield from ((at, part) for at, part in _ends(thing) if len(thing) <= _FEW or _works(part))
            case dict():
                yield from (item for _, item in _ends(dict.items(thing)) if len(thing) <= _FEW or _works(item[1]))
            case functools.partial():
                parts = {
                    "func": thing.func,
                    **{f"args.{at}": each for at, each in enumerate(thing.args)},
                    **thing.keywords,
                }
                self._hold(Given(name, parts, self._known, whole=True, told=True))
                yield from parts.items()
            case MethodType() | BuiltinMethodType() | MethodWrapperType():
                yield from self._bound(name, thing.__self__)
            case _ if type(thing) is _CALLING:  # an exhausted iterator has no function left to call
                yield from (("call", part) for part in thing.__reduce__()[1][:1])
            case FunctionType():
                yield from self._function(name, thing)
            case type():
                if of_script(thing) and not issubclass(thing, _NO_STATE):
                    yield from self._class(name, thing)
            case torch.Tensor() | np.ndarray() | enum.Enum():
                return
            case _ if not (apart(thing) or is_c(type(thing))):
                yield from self._object(name, thing)

    def _bound(self, name: str, owner: Any) -> Iterator[tuple[str, Any]]:
        """Yield the object to which a method is bound. The object may be a value, as in `Random(3).random` or `[1, 2].pop`. The rank's own
        generators are left out."""
        if owner is None or isinstance(owner, ModuleType) or any(owner is each for each in OF_THE_RANK):
            return
        if isinstance(owner, (*GENERATORS, *_VALUES, Iterator)):
            self._hold(Given(name, {"self": owner}, self._known, whole=True, told=True))
        yield "self", owner

    def _object(self, name: str, thing: Any) -> Iterator[tuple[Any, Any]]:
        kind: Any = type(thing)
        if not hasattr(thing, "__dict__") and not slots_of(kind):
            return
        self._known.add(name, thing)
        bag = isinstance(thing, BAGS)
        own = bag or of_script(kind)
        whole = own or (_acts(thing) and not (self._stateful and hasattr(thing, "state_dict")))
        holder = (Bag if bag else Holder)(name, thing, self._known, whole=whole, told=own)
        self._hold(holder)
        yield from sorted(holder.live().items())
        yield from self._class(name, kind)

    def _class(self, name: str, kind: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the values that a class and its base classes share among all objects, and the functions of the class's methods."""
        yield from methods(kind)
        for each in kind.__mro__:
            if (id(each), "") in self._claimed or not of_script(each):
                continue
            self._claimed.add((id(each), ""))
            holder = OfClass(f"{name}.{each.__name__}", each, self._known, whole=True, told=True)
            self._hold(holder)
            yield from holder.live().items()

    def _function(self, name: str, thing: FunctionType) -> Iterator[tuple[Any, Any]]:
        own = not installed(thing.__code__.co_filename) and self._functions < _HOLDERS
        self._functions += own
        names = [each for each in names_of(thing) if not each.is_builtin] if own else []
        holder = Variables(name, thing, self._known, [*filter(self._claim, names)], told=own)
        if holder.holds:
            self._hold(holder)
        yield from holder.live().items()
        for each in names:
            part = each.value
            if isinstance(part, (FunctionType, type)) or is_own(part) or _acts(part):
                yield each.label, part

    def _claim(self, variable: Named) -> bool:
        """Return whether no earlier function has referred to the variable."""
        where = id(variable.around), variable.name
        if where in self._claimed:
            return False
        self._claimed.add(where)
        return True


def _ends(parts: Any) -> Iterator[tuple[int, Any]]:
    """Yield the parts with their numbers; of many parts, only the first and the last."""
    yield from enumerate(islice(parts, _ENDS))
    behind = min(_ENDS, len(parts) - _ENDS)
    if behind > 0:
        yield from zip(reversed(range(len(parts))), islice(reversed(parts), behind), strict=False)


def _around(name: str, holders: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the objects in which an object was found. A function that was given as the loader is left out."""
    while name := name.rpartition(".")[0]:
        if name in holders and not (name == "loader" and isinstance(holders[name], FunctionType)):
            yield holders[name]


def _gives(thing: Any) -> bool:
    """Return whether the object gives samples, or chooses them."""
    return not isinstance(thing, (type, ModuleType)) and any(
        hasattr(type(thing), name) for name in ("__iter__", "__getitem__")
    )


def _works(part: Any) -> bool:
    """Return whether a part of a long list is not data. A dataset may be a list of a million pairs of file and number."""
    return type(part) not in _DATA and _acts(part)


def _acts(thing: Any) -> bool:
    """Return whether the object gives samples, makes them, or draws random numbers."""
    return type(thing) not in PLAIN and (_gives(thing) or callable(thing) or isinstance(thing, GENERATORS))
