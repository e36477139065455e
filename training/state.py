"""What the training state is, and how it is put back: live tensors by name, and the small things beside them.

Restoring copies into the *live* tensors: Megatron's parameters, gradient buffers and optimizer shards are views of each other, and a
tensor that is replaced instead of filled would silently leave them behind. It also keeps clear of the load paths of others (a native
Adam that shares one `step` among all parameters; weight-decay groups swapped between pipeline stages; both met in Megatron).

A source is anything given to `Session(name=source)`: a module, or a list of them; an optimizer, plain or Megatron's; an object
with `state_dict` and `load_state_dict`; or anything else that can be filled in place (docs/state.md). What such a thing holds of the others
is a source of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Protocol, runtime_checkable

import torch

from ..checkpoint.tree import Tagged
from ..resilience.errors import LayoutError, SnapshotError
from .live import Nested, plain, update
from .models import Modules
from .objects import kind_of
from .optimizers import Optimizers, inner_optimizers
from .packing import CURE, Packing, Unpacking, changes, difference, is_source


class Source(Protocol):
    def collect(self) -> Nested:
        """Live tensors and plain values, nested; the caller copies the tensors before anything changes them."""
        ...

    def restore(self, kept: Nested) -> None:
        """Put back what `collect` gave. The tensors in `kept` are new ones, the source's to keep."""
        ...


@runtime_checkable
class Preparing(Source, Protocol):
    """A source whose tensors are filled where they are: in `kept`, one that `collect` gives and that fits is that very tensor, filled."""

    def prepare(self, described: Nested) -> None:
        """Before anything is touched: `described` is what `restore` will get, with a `Piece` for each tensor. Make room for what a fresh
        start does not have yet. Raises LayoutError where it cannot fit."""
        ...


def sources_of(given: Mapping[str, Any], look_through: bool = True) -> dict[str, Source]:
    """The sources of what a Session is given, and of what that holds: `models={"g": G}` has the further source `models.g`. Raises TypeError
    as `source_of` does, and SnapshotError for what can't be saved."""
    known = Known()
    things = {name: thing for name, thing in given.items() if thing is not None}
    found = {name: source_of(name, thing, known) for name, thing in things.items()}
    for name, source in found.items():
        if not isinstance(source, Values):
            known.add(name, things[name])

    def further(name: str, thing: Any) -> str:
        name = known.add(name, thing)
        found[name] = source_of(name, thing, known)
        return name

    for source in list(found.values()) if look_through else ():
        if isinstance(source, Values):
            source.look_through(further)
    return found


def source_of(name: str, thing: Any, known: Known | None = None) -> Source:
    """The adapter for `thing`. Raises TypeError naming it when there is none."""
    kind: Any = type(thing)
    known = known or Known()
    if isinstance(thing, torch.nn.Module):
        return Modules([thing])
    if isinstance(thing, (list, tuple)) and thing and all(isinstance(m, torch.nn.Module) for m in thing):
        return Modules(thing)
    if hasattr(thing, "collect") and hasattr(thing, "restore"):
        return thing
    if isinstance(thing, torch.optim.Optimizer) or inner_optimizers(thing):
        return Optimizers(thing)
    if kind.__name__ == "OptimizerParamScheduler":
        # Megatron's own load adds the steps to those that are counted already.
        return Attributes(thing)
    if is_source(kind):
        return Stateful(name, thing, known)
    if isinstance(thing, MutableMapping) or changes(thing):
        return Values(name, thing, known)
    raise TypeError(f"Session({name}=…): {kind.__name__} is no module, no optimizer, no mapping and has no state_dict")


class Known:
    """What is a source of its own: where a mapping holds it, its name is kept there."""

    def __init__(self) -> None:
        self.things: dict[str, Any] = {}
        self.names: dict[int, str] = {}
        """By id."""

    def add(self, name: str, thing: Any) -> str:
        while name in self.things:
            name += "~"
        self.things[name], self.names[id(thing)] = thing, name
        return name


class Packed:
    """What packs values for a snapshot, in the way that `packing.py` has."""

    def __init__(self, name: str, known: Known) -> None:
        self._name, self._known = name, known
        self._shared: set[int] = set()

    def pack(self, value: Any, found: Callable[[str, Any], str] | None = None) -> Any:
        """Raises SnapshotError for what can't be saved."""
        while True:
            packing = Packing(self._name, self._known.names, self._shared, found)
            packed = packing.pack(value)
            if packing.shared == self._shared:
                return packed
            self._shared = packing.shared

    def unpack(self, kept: Any, live: Any) -> Any:
        return Unpacking(self._name, self._known.things).unpack(kept, live)

    def prove(self, kept: Any) -> None:
        """What is `kept` of this source can be made again, and is the same then. Raises SnapshotError."""
        try:
            again = Packed(self._name, self._known).pack(self.unpack(kept, None))
        except LayoutError as error:
            raise SnapshotError(f"{error}. {CURE}") from error
        if where := difference(kept, again, self._name):
            raise SnapshotError(f"{where} does not come back from a snapshot as it was. {CURE}")


class Stateful(Packed):
    """Whatever has `state_dict` and `load_state_dict`: schedulers, data loaders."""

    def __init__(self, name: str, thing: Any, known: Known) -> None:
        super().__init__(name, known)
        self.thing = thing

    def collect(self) -> Nested:
        return self.pack(dict(self.thing.state_dict()))

    def restore(self, kept: Nested) -> None:
        self.thing.load_state_dict(self.unpack(kept, None))


class Values(Packed):
    """Any live thing that `packing.py` takes apart, filled in place: a mapping, a list, an object of plain attributes."""

    def __init__(self, name: str, thing: Any, known: Known) -> None:
        super().__init__(name, known)
        self._thing = thing
        kind = type(thing)
        self._by_pairs = isinstance(thing, MutableMapping) and (
            kind is defaultdict or not (kind is dict or kind_of(kind))
        )
        """Its own class, and what a defaultdict makes, need not be kept: it is there whenever this is restored."""

    def look_through(self, found: Callable[[str, Any], str]) -> None:
        """Tell of each source that it holds: `found` gives its name."""
        self.pack(self._live(), found)

    def _live(self) -> Any:
        return dict(self._thing) if self._by_pairs else self._thing

    def collect(self) -> Any:
        return Tagged(("", self.pack(self._live())))

    def prove(self, kept: Any) -> None:
        super().prove(kept[1])

    def restore(self, kept: Any) -> None:
        if type(kept) is not Tagged:  # as it was kept before there were other values than plain ones
            update(self._thing, kept)
            return
        found = self.unpack(kept[1], self._live())
        if self._by_pairs:
            self._thing.clear()
            self._thing.update(found)
        elif found is not self._thing:
            raise LayoutError(
                f"{self._name} is a {type(self._thing).__qualname__} now, and was another kind of thing in the snapshot"
            )


class Attributes:
    """What is plain among the attributes of an object of Megatron's, which refer to its optimizer as well."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def collect(self) -> Nested:
        return plain(vars(self._thing))

    def restore(self, kept: Nested) -> None:
        update(vars(self._thing), kept)
