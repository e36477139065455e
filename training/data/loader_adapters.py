"""What a loop takes its batches from, by sort: how it is gone through from some batch of an epoch on.

a DataLoader over a map          its sampler leaves the first batches out: nothing of them is loaded
what has a state_dict            it goes on by itself, from its state
anything else                    from the start of the epoch only: the first batches have to be loaded again
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ...resilience.errors import UsageError
from .worker_rng import Beginning, Telling

Loadable = Iterable[Any] | Callable[[], Iterable[Any]]


class Loader:
    def __init__(self, loader: Loadable) -> None:
        """Raises UsageError for what can be gone through only once."""
        self.thing: Any = loader
        kind: Any = type(loader)  # by isinstance, Accelerate's are DataLoaders
        self._torchs = issubclass(kind, DataLoader)
        self._plain = self._torchs and kind.__iter__ is DataLoader.__iter__
        # Accelerate's loaders have both in any case, and read one batch ahead of it.
        adapts = hasattr(loader, "use_stateful_dataloader")
        self.stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") and not adapts
        if isinstance(loader, Iterator) and not self.stateful:
            raise UsageError(
                f"session.batches is given a {kind.__name__}, which can be gone through only once, and after a rewind its batches are "
                "wanted again: give it the function that makes it, without calling it"
            )
        if not self.stateful and any(
            isinstance(part, _BaseDataLoaderIter)
            for name, part in getattr(loader, "__dict__", {}).items()
            if name != "_iterator"
        ):
            raise UsageError(
                f"session.batches is given a {kind.__name__}, which goes on with one iterator from epoch to epoch, and cannot be put back: "
                "give it a DataLoader with persistent_workers=True, which keeps its workers too"
            )
        dataset = getattr(self.thing, "dataset", None)
        over_map = not isinstance(dataset, IterableDataset)
        self.skips = self._plain and over_map
        """Batches can be left out without loading them."""
        self.every = 0
        """So many batches lie between two places at which new workers can begin: there all have made as many, the first one makes the next,
        or the loader comes back to it by itself. 0: at the beginning of an epoch alone."""
        if self.stateful and (over_map or hasattr(dataset, "state_dict")):
            self.every = getattr(self.thing, "snapshot_every_n_steps", 1)
        elif self.skips:
            self.every = int(getattr(loader, "num_workers", 0))
        self._beginning = Beginning(getattr(loader, "worker_init_fn", None))
        self._behind = Behind(())

    def listen(self) -> None:
        """From now on its workers tell their generators, and batches can be left out. What the script has in its hands stays as it is."""
        if not (self._plain or (self._torchs and self.stateful)):
            return
        theirs, self.thing = self.thing, copy.copy(self.thing)
        if theirs.num_workers:
            self.thing.worker_init_fn, self.thing.collate_fn = self._beginning, Telling(theirs.collate_fn)
        if self._plain:
            which = "sampler" if theirs.batch_sampler is None else "batch_sampler"
            self._behind = Behind(getattr(theirs, which))
            vars(self.thing)[which] = self._behind
        self.let_go()

    def __len__(self) -> int:
        return len(self.thing)

    @property
    def samples(self) -> int:
        """In a batch of all ranks together; 0: not known."""
        batches = getattr(self.thing, "batch_sampler", None)
        samplers = (getattr(self.thing, "sampler", None), getattr(batches, "sampler", None), batches)
        replicas = max(int(getattr(sampler, "num_replicas", 1)) for sampler in samplers)
        return int(getattr(batches, "batch_size", None) or getattr(self.thing, "batch_size", None) or 0) * replicas

    @property
    def keeps_workers(self) -> bool:
        """Of the epoch before, for the next one."""
        return (
            bool(getattr(self.thing, "persistent_workers", False))
            and getattr(self.thing, "_iterator", None) is not None
        )

    def set_epoch(self, epoch: int) -> None:
        batches = getattr(self.thing, "batch_sampler", None)
        inner = (getattr(self.thing, name, None) for name in ("sampler", "dataset"))
        parts = (self.thing, batches, getattr(batches, "sampler", None), *inner)
        once: dict[int, Any] = {id(part): part for part in parts if hasattr(part, "set_epoch")}
        for part in once.values():
            part.set_epoch(epoch)

    def iterate(
        self, skip: int = 0, states: Mapping[int, Any] | None = None, before: Callable[[], None] | None = None
    ) -> Iterator[Any]:
        """The batches of the next epoch; where it `skips`, after the first `skip`. states: of new workers' generators. before: called right
        before a sampler begins."""
        self._beginning.states = states or {}
        self._behind.skip, self._behind.before = skip, before
        live = iter(self.thing if hasattr(self.thing, "__iter__") else self.thing())
        self._behind.leave_out()
        return live

    def let_go(self) -> None:
        """Of workers that are kept for the next epoch."""
        if hasattr(self.thing, "_iterator"):
            vars(self.thing)["_iterator"] = None

    def state(self, begun: bool) -> dict[str, Any]:
        """Its own; empty: it has none. (One of torchdata's that has not begun draws a seed when it is asked.)"""
        return dict(self.thing.state_dict()) if self.stateful and (begun or not self._torchs) else {}


class Behind:
    """A loader's sampler. Where it is iterated next, the first `skip` batches are left out, after a call of `before`."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._whole = sampler
        self.skip = 0
        self.before: Callable[[], None] | None = None
        self._begun: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        """A loader may do this twice before it takes anything."""
        if self.before is not None:
            self.before()
        self._begun = iter(self._whole)
        return self._taken()

    def _taken(self) -> Iterator[Any]:
        self.leave_out()
        yield from self._begun

    def __len__(self) -> int:
        return len(self._whole)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """What the sampler has: `set_epoch`, a sampler of its own, `batch_size`."""
        return getattr(self._whole, name)

    def leave_out(self) -> None:
        """Now, where that has not been done: some samplers draw with their first batch."""
        skip, self.skip, self.before = self.skip, 0, None
        for _ in islice(self._begun, skip):
            pass
