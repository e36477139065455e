"""What the training state is, and how it is put back: live tensors by name, and the small things beside them.

Restoring copies into the *live* tensors: Megatron's parameters, gradient buffers and optimizer shards are views of each other, and a
tensor that is replaced instead of filled would silently leave them behind. It also keeps clear of the load paths of others (a native
Adam that shares one `step` among all parameters; weight-decay groups swapped between pipeline stages; both met in Megatron).

A source is anything given to `Session(name=source)`: a module, or a list of them; an optimizer, plain or Megatron's; an object
with `state_dict` and `load_state_dict`; or anything else that can be filled in place (docs/state.md). What such a thing holds of the others
is a source of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader

from .live import Nested
from .models import Modules
from .optimizers import Optimizers, inner_optimizers
from .packing import changes, is_source
from .values import Attributes, Iterated, Known, Stateful, Values


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


def sources_of(given: Mapping[str, Any], session: Any = None, look_through: bool = True) -> dict[str, Source]:
    """The sources of what a session is given, and of what that holds: `models={"g": G}` has the further source `models.g`. The session
    itself may be in there too. Raises TypeError as `source_of` does, and SnapshotError for what can't be saved."""
    known = Known()
    known.add("the session", session)
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
        iterated = isinstance(thing, DataLoader) and hasattr(thing, "_get_iterator")
        return (Iterated if iterated else Stateful)(name, thing, known)
    if isinstance(thing, MutableMapping) or changes(thing):
        return Values(name, thing, known)
    raise TypeError(f"Session({name}=…): {kind.__name__} is no module, no optimizer, no mapping and has no state_dict")
