"""Sources (objects that the Session saves) that are the script's own values: objects with a `state_dict`, and values that can be filled in
place."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ....checkpoint.format.pytree import Tagged
from ....resilience.errors import LayoutError, SnapshotError
from ..tensors.in_place import Nested, plain, update
from .borrowed_memory import Lenders, Loans
from .class_adapters import OBJECT, kind_of
from .kind import is_source, never_deleted
from .packing import CURE, ELEMENTS, Packing, changes
from .session_parts import Parts
from .shared_objects import Together
from .unpacking import Unpacking, difference

_PASSES = 3
"""The most packing passes. One pass finds which values share memory, and the next pass uses that. Values that a `state_dict` creates anew
have another address in each pass."""


class Known:
    """Objects that are sources of their own. If a mapping contains one of them, a snapshot stores the source's name there."""

    def __init__(self, lenders: Lenders | None = None, stays: Mapping[str, Any] = MappingProxyType({})) -> None:
        """stays: objects that no snapshot stores and that each start creates again, by name."""
        self._stays = stays
        self.lenders = Lenders() if lenders is None else lenders
        self.together = Together()
        self.things, self.names = self.lenders.sources, self.lenders.names
        """The sources by name, and their names by id."""

    def pointed(self) -> dict[int, str]:
        """Return the names of all objects to which a snapshot refers, by id."""
        return {**self.names, **{id(each): name for name, each in self._stays.items()}}

    def there(self) -> dict[str, Any]:
        """Return all objects to which a snapshot refers, by name."""
        return {**self.things, **self._stays}

    def add(self, name: str, thing: Any) -> str:
        while name in self.things:
            name += "~"
        self.things[name], self.names[id(thing)] = thing, name
        return name


class Packed:
    """Packs values for a snapshot with `packing.py`."""

    def __init__(self, name: str, known: Known, watches: bool = False) -> None:
        """watches: a restore does not fill tensors and arrays that come after the first packed value and are parts of a larger memory."""
        self._name, self._known, self._watches = name, known, watches
        self._shared: set[int] = set()
        self._borrows = False
        """Whether the last packed value contains tensors of an optimizer's state."""
        self._own: dict[int, tuple[int, int, int]] = {}
        """Values that used no lent memory when they were last packed."""
        self._began: list[weakref.ref[Any]] | None = None
        """The tensors and arrays in the first packed value."""
        self.trained: list[torch.Tensor] = []
        """The tensors in the last packed value that may have gradients."""

    def pack(self, value: Any, found: Callable[[str, Any], str] | None = None) -> Any:
        """Return the packed value. Raises SnapshotError for a value that can't be saved."""
        packed, known = None, self._known
        names = {id(each): name for name, each in known.together.others(self._name).items()} | known.pointed()
        theirs = known.together.met_before(self._name)
        loans, parts = Loans(known.lenders if found is None else Lenders()), Parts(known.lenders)
        for _ in range(_PASSES):
            packing = Packing(self._name, names, self._shared, found, theirs, loans, self._own, parts)
            packing.lent_mappings = loans.mappings() if self._borrows else {}
            try:
                packed = packing.pack(value)
            except SnapshotError:
                known.together.forget()
                raise
            self.trained, self._own = packing.trained, packing.own
            if packing.shared == self._shared and packing.lent_states == self._borrows:
                break
            self._shared, self._borrows = packing.shared, packing.lent_states
        known.together.packed(self._name, packing.met)
        if found is None:
            self.begin(packing.met)
        return packed

    def begin(self, met: Sequence[Any] = ()) -> None:
        """Record the tensors and arrays of the first packed value. Nothing was packed if the source had no values then."""
        if self._began is None and self._watches:
            self._began = [weakref.ref(each) for each in met if type(each) in ELEMENTS]

    def unpack(self, kept: Any, live: Any, made: list[Any] | None = None) -> Any:
        """Return the unpacked value. made: a list to which the objects in use are added."""
        known = self._known
        before = known.together.made_before(self._name)
        others = known.together.others(self._name)
        there = {**others, **known.there()}
        unpacking = Unpacking(self._name, there, before, Loans(known.lenders), Parts(known.lenders))
        if self._began is not None:
            unpacking.began = {id(each): each for ask in self._began if (each := ask()) is not None}
        unpacking.given = live, frozenset(map(id, others.values()))
        try:
            found = unpacking.unpack(kept, live)
            known.together.put_back(self._name, unpacking.made)
            return found
        finally:
            if made is not None:
                made += unpacking.made

    def prove(self, kept: Any) -> None:
        """Check that `kept` can be rebuilt and is then unchanged. Raises SnapshotError if not."""
        made: list[Any] = []
        try:
            again = Packed(self._name, self._known).pack(self.unpack(kept, None, made))
        except LayoutError as error:
            raise SnapshotError(f"{error}. {CURE}") from error
        finally:
            for each in made:
                _emptied(each)
        if where := difference(kept, again, self._name):
            raise SnapshotError(f"{where} would differ after a restore. {CURE}")

    def why_not(self, value: Any, called: str) -> str:
        """Return the reason why a snapshot could not restore the value unchanged; empty if it could. called: the value's name."""
        trial = Packed(called, self._known)
        try:
            trial.prove(trial.pack(value))
        except SnapshotError as error:
            return str(error).removeprefix(f"{called} can't be saved: ")
        return ""


class Stateful(Packed):
    """Any object with `state_dict` and `load_state_dict`, such as schedulers and data loaders."""

    def __init__(self, name: str, thing: Any, known: Known) -> None:
        super().__init__(name, known)
        self.thing = thing
        self._names: frozenset[str] = frozenset()
        """The names of a scheduler's attributes when it was first saved or restored."""

    def look_through(self, found: Callable[[str, Any], str]) -> None:
        """Report each source in its state: a scheduler's state may contain another scheduler. `found` returns the source's name."""
        if any(map(is_source, map(type, getattr(self.thing, "__dict__", {}).values()))):
            with suppress(
                AttributeError, LookupError, RuntimeError, TypeError, ValueError
            ):  # the first snapshot reports it
                self.pack(self._state(), found)

    def _state(self) -> Any:
        said = self.thing.state_dict()
        return said if not isinstance(said, Mapping) or getattr(said, "__dict__", None) else dict(said)

    def collect(self) -> Any:
        self._begin_names()
        return self.pack(self._state())

    def _begin_names(self) -> None:
        if not self._names and type(self.thing).state_dict is LRScheduler.state_dict:
            self._names = frozenset(vars(self.thing))

    def held(self) -> Iterator[tuple[str, Any]]:
        """Yield models and optimizers in the object's attributes, and in lists and dicts there. These models and optimizers are saved
        separately, because the object's `state_dict` may omit a part of them, and its `load_state_dict` may convert states to the dtype of
        their parameters."""
        if isinstance(self.thing, LRScheduler):
            return
        for name, value in getattr(self.thing, "__dict__", {}).items():
            parts = enumerate(value) if type(value) in (list, tuple) else value.items() if type(value) is dict else ()
            for path, each in ((name, value), *((f"{name}.{at}", part) for at, part in parts)):
                if isinstance(each, (torch.nn.Module, torch.optim.Optimizer)):
                    yield path, each

    def restore(self, kept: Any) -> None:
        self._begin_names()
        self._load(state := self.unpack(kept, None))
        # torch's state_dict contains every attribute, so what it lacks was added after the snapshot.
        for name in vars(self.thing).keys() - self._names - state.keys() if self._names else ():
            object.__delattr__(self.thing, name)

    def _load(self, state: Any) -> None:
        # These optimizers are sources of their own, which fill groups and states in place, before or after this load.
        own = [
            each for _, each in self.held() if isinstance(each, torch.optim.Optimizer) and id(each) in self._known.names
        ]
        before = [(each.param_groups, each.state) for each in own]
        self.thing.load_state_dict(state)
        for optimizer, was in zip(own, before, strict=True):
            self._same_objects(optimizer, *was)

    def _same_objects(self, optimizer: Any, groups: Any, state: Any) -> None:
        """Put the old groups and the old state back. torch's `load_state_dict` creates new ones, but the object may share the old ones, as
        Apex's LARC does."""
        new = optimizer.param_groups, optimizer.state
        optimizer.param_groups, optimizer.state = groups, state
        for name, value in vars(self.thing).items():
            if value is new[0] or value is new[1]:
                setattr(self.thing, name, groups if value is new[0] else state)


class Iterated(Stateful):
    """A DataLoader with a state (torchdata's). A restore also gives the script's iterator over the loader the attributes of a new
    iterator."""

    def look_through(self, found: Callable[[str, Any], str]) -> None:
        """Do nothing: the loader's state contains no source, and reading the state begins an epoch."""

    def restore(self, kept: Nested) -> None:
        live = self.thing._iterator
        super().restore(kept)
        if live is not None:
            made = self.thing._get_iterator()
            live.__dict__, made.__dict__ = made.__dict__, live.__dict__
            self.thing._iterator = live


class Values(Packed):
    """Any live value that `packing.py` can take apart and that is filled in place: a mapping, a list, an object of plain attributes."""

    def __init__(self, name: str, thing: Any, known: Known) -> None:
        super().__init__(name, known, watches=True)
        self._thing = thing
        known.together.add(name, thing)
        kind = type(thing)
        self._by_pairs = isinstance(thing, MutableMapping) and (
            kind is defaultdict or not (kind is dict or kind_of(kind))
        )
        """Whether only the pairs of the mapping are saved. The mapping's own class, or a defaultdict's factory, exists whenever the mapping
        is restored."""

    def look_through(self, found: Callable[[str, Any], str]) -> None:
        """Report each source in the value. `found` returns the source's name."""
        self.pack(self._live(), found)

    def _live(self) -> Any:
        return dict(self._thing) if self._by_pairs else self._thing

    def collect(self) -> Any:
        self._known.lenders.sharing.note(self._name, {id(self._thing): self._name, **self._held()})
        return Tagged(("", self.pack(self._live())))

    def _held(self) -> dict[int, str]:
        """Return the names of the changeable objects that the value contains directly, by id."""
        pairs = self._thing.items() if isinstance(self._thing, MutableMapping) else ()
        return {id(each): f"{self._name}[{key!r:.40}]" for key, each in pairs if changes(each)}

    def prove(self, kept: Any) -> None:
        super().prove(kept[1])

    def restore(self, kept: Any) -> None:
        if type(kept) is not Tagged:  # a snapshot from the time when only plain values were saved
            update(self._thing, kept)
            return
        found = self.unpack(kept[1], self._live())
        if self._by_pairs:
            self._thing.clear()
            self._thing.update(found)
        elif found is not self._thing:
            raise LayoutError(
                f"{self._name} is a {type(self._thing).__qualname__} now, but had another type in the snapshot"
            )


class Attributes:
    """The plain attributes of one of Megatron's objects. (Other attributes of the object refer, for example, to its optimizer.)"""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def collect(self) -> Nested:
        return plain(vars(self._thing))

    def restore(self, kept: Nested) -> None:
        update(vars(self._thing), kept)


def _emptied(copy: Any) -> None:
    """Empty a copy that is no longer needed. Unless emptied, the copy's `__del__` would clean up something that the live object uses, such
    as a file."""
    known = kind_of(type(copy))
    if known is not None and known.name == OBJECT and hasattr(type(copy), "__del__"):
        getattr(copy, "__dict__", {}).clear()
        never_deleted(copy)
