"""What the training state is, and how it is put back: live tensors by name, and the small things beside them.

Restoring copies into the *live* tensors: Megatron's parameters, gradient buffers and optimizer shards are views of each other, and a
tensor that is replaced instead of filled would silently leave them behind. It also keeps clear of the load paths of others (a native
Adam that shares one `step` among all parameters; weight-decay groups swapped between pipeline stages; both met in Megatron).

A source is anything given to `Session(name=source)`: a module, or a list of them; an optimizer, plain or Megatron's; an object
with `state_dict` and `load_state_dict`; or a mutable mapping of plain values.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from .live import Nested, plain, update
from .models import Modules
from .optimizers import Optimizers, inner_optimizers


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


def source_of(name: str, thing: Any) -> Source:
    """The adapter for `thing`. Raises TypeError naming it when there is none."""
    if isinstance(thing, torch.nn.Module):
        return Modules([thing])
    if isinstance(thing, (list, tuple)) and thing and all(isinstance(m, torch.nn.Module) for m in thing):
        return Modules(thing)
    if hasattr(thing, "collect") and hasattr(thing, "restore"):
        return thing
    if isinstance(thing, torch.optim.Optimizer) or inner_optimizers(thing):
        return Optimizers(thing)
    if type(thing).__name__ == "OptimizerParamScheduler":
        # Megatron's own load adds the steps to those that are counted already.
        return Values(vars(thing))
    if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
        return Stateful(thing)
    if isinstance(thing, MutableMapping):
        return Values(thing, called=name)
    raise TypeError(
        f"Session({name}=…): {type(thing).__name__} is no module, no optimizer, no mapping and has no state_dict"
    )


class Stateful:
    """Whatever has `state_dict` and `load_state_dict`: schedulers, data loaders."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def collect(self) -> Nested:
        return dict(self.thing.state_dict())

    def restore(self, kept: Nested) -> None:
        self.thing.load_state_dict(kept)


class Values:
    """A mapping of plain values, or the attributes of an object, filled in place."""

    def __init__(self, mapping: MutableMapping[str, Any], names: Sequence[str] | None = None, called: str = "") -> None:
        """called: as the script has named it, which is told once what cannot be kept; empty: nobody is told."""
        self.mapping = mapping
        self.names = names
        self._called = called

    def collect(self) -> Nested:
        kept = plain({k: v for k, v in self.mapping.items() if self.names is None or k in self.names})
        if self._called and (left := [f"{k} ({type(v).__name__})" for k, v in self.mapping.items() if k not in kept]):
            print(
                f"mt-resilient: Session({self._called}=…): {', '.join(left)} can't be kept: after a recovery it is as the script makes it",
                file=sys.stderr,
                flush=True,
            )
            self._called = ""
        return kept

    def restore(self, kept: Nested) -> None:
        update(self.mapping, kept)
