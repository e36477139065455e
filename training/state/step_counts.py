"""Step counts of Hugging Face Accelerate, as a source (an object that the Session saves). The step counts decide after which batches
gradients are reduced.

Accelerate's own `save_state` also saves the `step` of an Accelerator. The other objects that `save_state` saves are separate sources here.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from ..live_instances import live_instances
from .tensors.in_place import Nested

_COUNTED = {
    ("accelerate.accelerator", "Accelerator"): ("step", "sync_gradients"),
    ("accelerate.local_sgd", "LocalSGD"): ("num_steps",),
}


class StepCounts:
    def __init__(self, named: Mapping[str, Any]) -> None:
        """named: the counting objects that the script gave to the Session."""
        self._things = dict(named)

    def look(self, tell: Callable[[str], None]) -> None:
        """Add all other counting objects in this process when the loop begins, because a script may not give them to the Session."""
        known = {id(thing) for thing in self._things.values()}
        found = len(_others(known))
        if found > 1:  # some of the objects may be garbage
            gc.collect()
        others = _others(known) if found else []
        kinds = [type(thing).__name__ for thing in others]
        for number, (kind, thing) in enumerate(zip(kinds, others, strict=True)):
            self._things[f"{kind} {kinds[:number].count(kind)}"] = thing
        for kind in dict.fromkeys(kind for kind in kinds if kinds.count(kind) > 1):
            tell(
                f"this script has several objects of the class {kind}, and a restart may swap their step counts. Give each to the "
                "Session under a name of its own: Session(…, first=first, second=second)"
            )

    def collect(self) -> Nested:
        return {
            name: torch.tensor([int(getattr(thing, counted)) for counted in _counted(thing)], device="cpu")
            for name, thing in self._things.items()
        }

    def restore(self, kept: Nested) -> None:
        for name, thing in self._things.items():
            if name in kept:
                for counted, value in zip(_counted(thing), kept[name].tolist(), strict=True):
                    setattr(thing, counted, type(getattr(thing, counted))(value))


def counts_steps(thing: Any) -> bool:
    """Whether the object is of a class in Accelerate that counts steps."""
    return isinstance(thing, tuple(_kinds()))


def _kinds() -> dict[type, tuple[str, ...]]:
    """Return the imported classes that count steps, each with the names of its counts."""
    found = {getattr(sys.modules.get(module), name, None): counted for (module, name), counted in _COUNTED.items()}
    return {kind: counted for kind, counted in found.items() if kind is not None}


def _counted(thing: Any) -> tuple[str, ...]:
    return next(counted for kind, counted in _kinds().items() if isinstance(thing, kind))


def _others(known: Collection[int]) -> list[Any]:
    kinds = tuple(_kinds())
    return [thing for thing in live_instances(*kinds) if id(thing) not in known] if kinds else []
