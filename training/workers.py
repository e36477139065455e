"""A data loader with our hands in it: its workers tell their generators with each batch, and new ones begin where the last ones were.

A worker draws for what it loads (crops, noise) from generators of its own, which go on from batch to batch. So that batches that were used
already need not be loaded again, each comes with the state of the generators of the worker that has made it:

worker: samples ─▶ collate ─▶ (batch, worker, state) ─▶ `Batches`, which keeps the states, and hands them to the next workers
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, get_worker_info

from .randomness import collect_host, collect_own, own_generators, restore_host, restore_own


class Generators:
    """What a worker's generators were after a batch. (No tuple and no mapping: who puts batches into pinned memory leaves it as it is.)"""

    def __init__(self, dataset: Any) -> None:
        host = collect_host()
        # A tensor would be sent as a file descriptor.
        self.state = {
            "host": {**host, "torch": host["torch"].numpy()},
            "own": collect_own(own_generators(dataset=dataset)),
        }


class Made(NamedTuple):
    """A batch, and who has made it. (A tuple with names is put into pinned memory part by part.)"""

    batch: Any
    worker: int
    generators: Generators


class Telling:
    """A loader's `collate_fn`, in a worker."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        batch, worker = self.collate(samples), get_worker_info()
        return batch if worker is None else Made(batch, worker.id, Generators(worker.dataset))


class Beginning:
    """A loader's `worker_init_fn`, and then the generators of those workers that `states` knows, as they were."""

    def __init__(self, begin: Callable[[int], None] | None) -> None:
        self.begin = begin
        self.states: Mapping[int, Any] = {}

    def __call__(self, worker: int) -> None:
        if self.begin is not None:
            self.begin(worker)
        info = get_worker_info()
        if info is not None and worker in self.states:
            state = self.states[worker]
            restore_host({**state["host"], "torch": torch.from_numpy(state["host"]["torch"])})
            restore_own(own_generators(dataset=info.dataset), state["own"])


class Behind:
    """A loader's sampler. Where it is iterated next, the first `skip` batches are left out, after a call of `before`."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.sampler = sampler
        self.skip = 0
        self.before: Callable[[], None] | None = None
        self._begun: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        """A loader may do this twice before it takes anything."""
        if self.before is not None:
            self.before()
        self._begun = iter(self.sampler)
        return self._taken()

    def _taken(self) -> Iterator[Any]:
        self.leave_out()
        yield from self._begun

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def leave_out(self) -> None:
        """Now, where that has not been done: some samplers draw with their first batch."""
        skip, self.skip, self.before = self.skip, 0, None
        for _ in islice(self._begun, skip):
            pass


class View:
    """`loader` once more, of which these two are ours. skips: its sampler is, too."""

    def __init__(self, loader: DataLoader[Any], *, skips: bool) -> None:
        self.loader = copy.copy(loader)
        self._beginning = Beginning(loader.worker_init_fn)
        if loader.num_workers:
            self.loader.worker_init_fn, self.loader.collate_fn = self._beginning, Telling(loader.collate_fn)
        which = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._behind = Behind(getattr(loader, which))
        vars(self.loader).update({"_iterator": None, **({which: self._behind} if skips else {})})

    def iterate(
        self, skip: int = 0, states: Mapping[int, Any] | None = None, before: Callable[[], None] | None = None
    ) -> Iterator[Any]:
        """The batches after the first `skip`, by workers whose generators are in `states`; from kept workers, where they are persistent."""
        self._beginning.states = states or {}
        self._behind.skip, self._behind.before = skip, before
        live = iter(self.loader)
        self._behind.leave_out()
        return live

    def let_go(self) -> None:
        """Of workers that are kept for the next epoch."""
        vars(self.loader)["_iterator"] = None
