"""Turn a script's values into what a snapshot stores: plain values, containers of them, tensors, and tagged values.

Each object is stored once. Every other reference to it becomes an alias: the object's number, counted in the order of the pass.
`unpacking.py` counts in the same order. If a value can't be taken apart, the error message gives its path and type.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch.nn import Parameter

from ....checkpoint.arena.staging import refuse
from ....checkpoint.format.pytree import Tagged
from ....checkpoint.format.pytree_walk import PLAIN, TOO_DEEP
from ....resilience.errors import SnapshotError
from . import array_views, type_adapters
from .array_views import Unsavable
from .borrowed_memory import STATE, Held, Lenders, Loans, Place, holders, memory_said, offset_in
from .class_adapters import TYPED, NotFound, is_registered, kind_of
from .kind import is_source
from .session_parts import Parts, keys_may_be_ids, may_be_ids
from .sharded_tensors import is_sharded, save_sharded
from .shared_objects import Theirs
from .trail import Hidden, called, place_of

MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
_WITH_ATTRIBUTES = frozenset((OrderedDict, Counter))
"""Mappings that may have attributes, as the OrderedDict that a module's `state_dict` returns has `_metadata`."""
_EASY_KEYS = frozenset((str, int))
ELEMENTS = frozenset((*array_views.TENSORS, np.ndarray))
CURE = "Keep it out of the Session, give its class state_dict and load_state_dict, or use mt_resilient.register (docs/state.md)"


class Packing:
    """One pass over one source (an object that the Session saves), from the top down."""

    def __init__(
        self,
        name: str,
        sources: Mapping[int, str],
        shared: Collection[int] = (),
        found: Callable[[str, Any], str] | None = None,
        theirs: Mapping[int, Theirs] = MappingProxyType({}),
        loans: Loans | None = None,
        own: Mapping[int, tuple[int, int, int]] = MappingProxyType({}),
        parts: Parts | None = None,
    ) -> None:
        """sources: names of objects that are sources of their own, by id. shared: addresses of memory in which several values lie. found:
        called with the path of each further source, returns the source's name. theirs: objects that other sources have packed before, by
        id. loans: memory that other sources lend. own: values that used no lent memory in the last pass. parts: the modules to which values
        refer."""
        self._parts = Parts(Lenders()) if parts is None else parts
        self._name = name
        self._at: list[Any] = [name]
        self._shared, self._found = shared, found
        self._theirs, self._loans = theirs, loans or None  # None if no source lends memory
        self._known_own = own
        self.own: dict[int, tuple[int, int, int]] = {}
        """Values that use no lent memory, by id: the address of each, and the numbers of references to it and its memory."""
        self._known: dict[int, int | str] = dict(sources)
        """The number of each object that was packed, or the name of a source, by id."""
        self._hashing = False
        """Whether the value being packed is a key of a mapping or a member of a set."""
        self.met: list[Any] = []
        """The packed objects by number. The references keep each object's id from being used again during the pass."""
        self._memories: dict[int, Any] = {}
        """Memory that contains views, by address."""
        self._borrowed_at: dict[tuple[Place, bool], int] = {}
        """The numbers of lent memory, by place and by whether arrays use it."""
        self.lent_mappings: Mapping[int, Place] = {}
        """The places of mappings that sources lend, by id."""
        self.lent_states = False
        """Whether the pass met a parameter's state in an optimizer, or a tensor in such a state."""
        self._lain_in: set[int] = set()
        self.shared: set[int] = set()
        """The addresses of memory in which the pass found several values."""
        self.trained: list[torch.Tensor] = []
        """The packed tensors that may have gradients."""

    def pack(self, value: Any, place: str = "") -> Any:
        """Return the packed value. place: the path from the source to the value, such as `.param_groups[0]`. Raises SnapshotError for a
        value that can't be saved."""
        self._at = [self._name + place]
        try:
            return self._down(value)
        except RecursionError:
            raise SnapshotError(f"{self._name}{place}: {TOO_DEEP}. {CURE}") from None
        except (Unsavable, NotFound) as error:
            raise SnapshotError(f"{called(self._at)} can't be saved: {error}. {CURE}") from None

    def _down(self, value: Any) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return self._pointed(value) if kind is int else value
        known = self._known.get(id(value))
        if known is not None:
            return Tagged(("source" if type(known) is str else "alias", known))
        if self._theirs and (met := self._theirs.get(id(value))) is not None:
            return Tagged(("theirs", [*met]))
        if kind in ELEMENTS:
            return self._elements(value)
        if kind is tuple:
            return value if self._plain(value) else tuple(self._each(value))
        if kind is list:
            self._number(value)
            return value if self._plain(value) else self._each(value)
        if kind in MAPPINGS and not (kind in _WITH_ATTRIBUTES and vars(value).keys() - {TYPED}):
            if self.lent_mappings and (place := self.lent_mappings.get(id(value))) is not None:
                self.lent_states = True
                return Tagged(("lent", [*place]))
            self._number(value)
            return self._mapping(kind, value)
        return self._other(kind, value)

    def _plain(self, values: Collection[Any]) -> bool:
        """Return whether all values are plain, and none of them is the id of a known object."""
        return PLAIN.issuperset(map(type, values)) and not (may_be_ids(values) and self._points(values))

    def _points(self, numbers: Collection[Any]) -> bool:
        return self._parts.has_any(numbers) or not self._known.keys().isdisjoint(numbers)

    def _pointed(self, number: int) -> Any:
        """Return a reference to the tensor or module that has this id. If no tensor or module has this id, return the number itself."""
        known = self._known.get(number)
        if known is not None and type(known) is int and type(self.met[known]) in array_views.TENSORS:
            return Tagged(("id", Tagged(("alias", known))))
        return self._parts.noted(number) or number

    def _number(self, value: Any) -> None:
        self._known[id(value)] = len(self.met)
        self.met.append(value)

    def _each(self, values: Any, keys: Sequence[Any] = ()) -> list[Any]:
        """Return the packed values. keys: the keys of the values, if these are not their positions."""
        self._at.append(0)
        found = []
        for at, value in enumerate(values):
            self._at[-1] = self._parts.label(keys[at], at) if keys and self._found else at
            found.append(self._down(value))
        self._at.pop()
        return found

    def _mapping(self, kind: type, value: Any) -> Any:
        if not _EASY_KEYS.issuperset(map(type, value)) or (keys_may_be_ids(value) and self._points(value)):
            return Tagged(("keys", [MAPPINGS[kind], self._hashed(tuple(value)), self._each(value.values(), [*value])]))
        if self._plain(value.values()):
            return value
        found: Any = kind()
        self._at.append("")
        for key, item in value.items():
            self._at[-1] = key
            found[key] = self._down(item)
        self._at.pop()
        return found

    def _hashed(self, values: tuple[Any, ...]) -> Any:
        """Return the packed keys, or members of a set. Raises Unsavable if one of them is identified by its id, not by its value."""
        before, self._hashing = len(self.met), True
        found, self._hashing = self._down(values), False
        if len(self.met) != before:
            raise Unsavable("some of its keys or members are compared by identity, not by value")
        return found

    def _elements(self, value: Any) -> Any:
        if type(value) is Parameter and (part := self._parts.said(value)):
            return part
        array = type(value) is np.ndarray
        plain = array_views.is_plain_array(value) if array else array_views.is_plain_tensor(value)
        if not plain:
            self._refuse(value)
        lies_in = array_views.address(value)
        loan = None if self._loans is None else self._loan(value, lies_in, self._holders(value))
        if loan is not None:
            self.lent_states = self.lent_states or loan[0][1].startswith(STATE)
            if loan[1] is value:
                return Tagged(("lent", [*loan[0]]))
        self._known[id(value)] = len(self.met)  # `_number` without the call, because there are thousands of values
        self.met.append(value)
        if not plain and not array and value.requires_grad:
            self.trained.append(value)
        if loan is not None:
            return Tagged(("view", self._borrowed(*loan, value)))
        if lies_in in self._lain_in:
            self.shared.add(lies_in)
        elif lies_in:
            self._lain_in.add(lies_in)
        if lies_in in self._shared or not (plain or array or not array_views.overlaps(value)):
            return Tagged(("view", self._view(lies_in, value)))
        if plain:
            return value
        return Tagged(("array", array_views.save_array(value)) if array else ("tensor", array_views.save_tensor(value)))

    def _sharded(self, value: Any) -> Any:
        if self._loans and (place := self._loans.mappings().get(id(value))) is not None:
            return Tagged(("lent", [*place]))
        self._refuse(value)
        self._number(value)
        if value.requires_grad:
            self.trained.append(value)
        return Tagged(("sharded", save_sharded(value)))

    def _refuse(self, value: Any) -> None:
        if type(value) is not np.ndarray:
            refuse(called(self._at), value)
            if value.grad_fn is not None:
                raise Unsavable("it has an autograd graph, which no snapshot stores: keep its .detach()")
        elif value.dtype.hasobject:
            raise Unsavable("it holds Python objects: keep them in a list")
        elif not type_adapters.describable(value.dtype):
            raise Unsavable(
                f"it is an array of {value.dtype}, which numpy's file format can't describe: keep its .view() as integers"
            )

    def _view(self, lies_in: int, value: Any) -> Any:
        memory = self._memories.get(lies_in)
        if memory is not None:
            said: Any = Tagged(("alias", self._known[id(memory)]))
        else:
            said = memory = self._memories[lies_in] = array_views.memory_of(value)
            self._number(memory)
        if (type(memory) is np.ndarray) != (type(value) is np.ndarray):
            raise Unsavable("an array of numpy and a tensor lie in the same memory: keep one of them")
        return array_views.save_view(value, said)

    def _holders(self, value: Any) -> Held:
        """Return the number of references to the value, including the callers', and the number of references to its memory."""
        return sys.getrefcount(value), 1 << 30 if type(value) is np.ndarray else holders(value)

    def _loan(self, value: Any, lies_in: int, held: Held) -> tuple[Place, Any] | None:
        """Return the tensor that lends the value's memory, or None. A value that had its own memory last time and is unchanged is not
        searched."""
        assert self._loans is not None
        seen = lies_in, *held
        if self._known_own.get(id(value)) != seen and (loan := self._loans.of(value, lies_in)):
            return loan
        self.own[id(value)] = seen
        return None

    def _borrowed(self, place: Place, lender: Any, value: Any) -> Any:
        array = type(value) is np.ndarray
        number = self._borrowed_at.get((place, array))
        if number is None:
            said: Any = memory_said(place, lender, array)
            self._borrowed_at[place, array] = len(self.met)
            self._number(said)
        else:
            said = Tagged(("alias", number))
        return {**array_views.save_view(value, said), "offset": offset_in(lender, value)}

    def _other(self, kind: type, value: Any) -> Any:
        known = kind_of(kind) if is_registered(kind) or not is_source(kind) else None
        known = type_adapters.METHOD if type_adapters.is_bound(value) else known
        if known is None and is_source(kind):
            points = isinstance(value, torch.nn.Module) and (self._found is None or self._hashing)
            if points and (part := self._parts.said(value)):
                return part
            if self._found is None:
                raise Unsavable(f"it is a {kind.__qualname__} that the Session does not know: give it to the Session")
            return Tagged(("source", self._found(".".join(map(str, place_of(self._at))), value)))
        if known is None and is_sharded(kind):
            return self._sharded(value)
        if known is None:
            raise Unsavable(f"it is a {kind.__module__}.{kind.__qualname__}")
        if known.fill is not None or known.moves:
            self._number(value)
        self._at.append(Hidden(known.hidden))
        try:
            content = known.save(value)
        except (Unsavable, NotFound):
            raise
        except Exception as error:  # raised by a class of the script, or by a closed buffer
            raise Unsavable(
                f"a {kind.__qualname__} does not give its state ({type(error).__name__}: {error})"
            ) from error
        found = self._hashed(content) if known.name in ("set", "frozenset") else self._down(content)
        if known.name == "set" and found is not content:
            found = tuple(sorted(found, key=repr))  # a set's own order depends on ids
        self._at.pop()
        return Tagged((known.name, found))


def changes(thing: Any) -> bool:
    """Return whether the object can be filled in place."""
    kind = type(thing)
    known = None if kind in PLAIN or kind is tuple else kind_of(kind)
    return kind in (list, *MAPPINGS, np.ndarray, *array_views.TENSORS) or (known is not None and known.fill is not None)
