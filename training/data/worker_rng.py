"""The generators of a data loader's workers: workers report them with each batch, and new workers start with the reported states.

A worker draws for its samples (crops, noise) from its own generators, which continue from batch to batch. Each batch comes with the state
of its worker's generators. So used batches need not be loaded again:

worker: samples ─▶ collate ─▶ (batch, worker, state) ─▶ `Heard` keeps the state, and the next workers get it; the loop gets the batch
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..state.rng import collect_host, restore_host
from .loader_state import Own

_own = Own()
"""The state of this worker's own dataset and collate function."""
_shared: dict[str, bytes] | None = None
"""The bytes of this worker's shared values after its last batch. None: the rank may have changed the values since then, between two
epochs."""


class Generators:
    """The states of a worker's generators and counters after a batch. (The class is no tuple or mapping, so that torch's code for pinned
    memory leaves it unchanged.)"""

    def __init__(self, moved: Sequence[str] = ()) -> None:
        """moved: names of shared values that were changed for this batch, or since the last batch."""
        host = collect_host()
        # A tensor would be sent as a file descriptor.
        self.state = {
            "host": {**host, "torch": host["torch"].numpy()},
            "own": _own.collect(),
        }
        self.lost = [*_own.lost(), *moved]
        """Names of values that have changed and can't be restored."""


class Made(NamedTuple):
    """A batch, and the worker that made it. (torch copies each field of a named tuple into pinned memory.)"""

    batch: Any
    worker: int
    generators: Generators


class Telling:
    """A loader's `collate_fn` in a worker, which adds the states of the worker's generators to each batch."""

    def __init__(self, collate: Callable[[Any], Any], stays: bool = False) -> None:
        """stays: the worker is persistent."""
        self.collate, self._stays = collate, stays

    def __call__(self, samples: Any) -> Any:
        global _shared
        before = _own.shared() if _shared is None else _shared
        batch, worker = self.collate(samples), get_worker_info()
        if worker is None:
            return batch
        now = _own.shared()
        moved = [name for name, held in now.items() if before.get(name, held) != held]
        _shared = None if self._stays else now
        return Made(batch, worker.id, Generators(moved))


class Beginning:
    """Calls a loader's `worker_init_fn`, and then restores the worker's generators if `states` has them."""

    def __init__(self) -> None:
        self.begin: Callable[[int], None] | None = None
        self.collate: Callable[[Any], Any] | None = None
        self.states: Mapping[int, Any] = {}
        self.stays = False

    def __call__(self, worker: int) -> None:
        global _own, _shared
        if self.begin is not None:
            self.begin(worker)
        info = get_worker_info()
        if info is not None:
            _own = Own(dataset=info.dataset, collate=self.collate)
        if worker in self.states:
            state = self.states[worker]
            restore_host({**state["host"], "torch": torch.from_numpy(state["host"]["torch"])})
            _own.restore(state["own"])
        _shared = None if self.stays else _own.shared()


class Heard:
    """The last reports of the workers."""

    def __init__(self) -> None:
        self.states: dict[int, Any] = {}
        """The generator states of each worker after its last batch."""
        self.lost: list[str] = []
        """Names of values that have changed and can't be restored."""

    def batch(self, made: Any) -> Any:
        """Return the batch without the worker's report, and keep the report."""
        if not isinstance(made, Made):
            return made
        self.states[made.worker] = made.generators.state
        self.lost += made.generators.lost
        return made.batch


def listen_to(live: Any, heard: Heard) -> None:
    """Make the iterator return plain batches to any caller. `heard` gets the workers' reports."""
    if isinstance(live, _BaseDataLoaderIter):
        if not isinstance(live, _Listened):
            kind: Any = type(live)
            live.__class__ = _listened(kind)
        live.heard = heard  # type: ignore[attr-defined]


class _Listened:
    heard: Heard

    def _next_data(self) -> Any:
        return self.heard.batch(super()._next_data())  # type: ignore[misc]


@cache
def _listened(kind: Any) -> Any:
    """Return a class of the iterator's kind that is also `_Listened`."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (_Listened, kind), names)
