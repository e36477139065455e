"""The batches of a loop of one's own, epoch after epoch, and the place in them as a part of the state.

A data loader cannot say where it is. What can be had again is the beginning of an epoch: the generators as they were then, which give the
same order of samples and the same seeds of workers. From there the batches that were used already are left out:

    a DataLoader over a map          by its sampler: nothing of them is loaded; generators of workers are put back (`workers.py`)
    what has a state_dict            by its own `load_state_dict`
    anything else                    they are loaded again, and thrown away

What is drawn for this from the rank's generators does not count: they are put back afterwards, by who calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from ..resilience.clock import monotonic_s
from ..resilience.errors import LayoutError, UsageError
from .live import Nested
from .randomness import Randomness, collect_own, own_generators, restore_own
from .workers import Made, View

OVER = object()
"""In place of a batch: there are no more."""
Loader = Iterable[Any] | Callable[[], Iterable[Any]]


class Batches:
    def __init__(
        self, loader: Loader, epochs: int | None, accumulate: int, begin_epoch: Callable[[int], None] | None
    ) -> None:
        """accumulate: a step uses so many. begin_epoch: called with its number before each; by default whatever of the loader has
        `set_epoch`."""
        self._loader, self._epochs, self._accumulate, self._begin_epoch = loader, epochs, accumulate, begin_epoch
        stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        # Accelerate's loaders have both in any case, and read one batch ahead of it.
        self._stateful = stateful and not hasattr(loader, "use_stateful_dataloader")
        if isinstance(loader, Iterator) and not self._stateful:
            raise UsageError(
                f"session.batches is given a {type(loader).__name__}, which can be gone through only once, and after a rewind its batches "
                "are wanted again: give it the function that makes it, without calling it"
            )
        sampler, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
        self._parts = (loader, sampler, batches, getattr(batches, "sampler", None), getattr(loader, "dataset", None))
        self._own = own_generators(loader=loader)
        self._randomness: Randomness | None = None
        self._place = (0, 1)
        self._view: View | None = None
        self._skips = False
        self._every = 0
        """So many batches lie between two places at which new workers can begin: there all have made as many, the first one makes the next,
        or the loader comes back to it by itself. 0: at the beginning of an epoch alone."""
        self.epoch = 0
        """The epoch of the last batch, counted from 0,"""
        self.offset = 0
        """how many batches of it were taken,"""
        self.position = 0
        """and how many steps' batches in all."""
        self._live: Iterator[Any] | None = None
        self._step: Iterator[Any] = iter(())
        """What is left of the present step's batches."""
        self._start: Nested | None = None
        """The generators before this epoch's iterator was made."""
        self._kept_workers = False
        """This epoch has those of the one before."""
        self._workers: dict[int, Nested] = {}
        """The generators of each worker after its last batch,"""
        self._begun: dict[int, Nested] = {}
        """and as they were where new workers have to begin."""
        self._owed: Nested | None = None
        """The state that is to be put back."""
        self._cost_told = False

    def keep(self, randomness: Randomness, rank: int, world: int) -> None:
        """From now on what is needed to come back here is kept. To be called before a batch is taken."""
        self._randomness, self._place, loader = randomness, (rank, world), self._loader
        kind: Any = type(loader)  # by isinstance, Accelerate's are DataLoaders
        torchs = issubclass(kind, DataLoader)
        plain = torchs and kind.__iter__ is DataLoader.__iter__
        dataset = getattr(loader, "dataset", None)
        self._skips = plain and not isinstance(dataset, IterableDataset)
        if self._stateful and (not isinstance(dataset, IterableDataset) or hasattr(dataset, "state_dict")):
            self._every = getattr(loader, "snapshot_every_n_steps", 1)
        elif self._skips:
            self._every = getattr(loader, "num_workers", 0)
        if torchs and (plain or self._stateful):
            self._view = View(cast(DataLoader[Any], loader), skips=self._skips)
            self._loader = self._view.loader

    @property
    def owed(self) -> bool:
        """A state was restored, and has to be put back."""
        return self._owed is not None

    def restored(self, index: int, same_job: bool) -> None:
        """The next step uses the batch of that number. Where its state was saved without a place in the data, the data begins here. Raises
        LayoutError where it is this very job's."""
        if self._owed is not None:
            return
        if same_job:
            raise LayoutError(
                "the snapshot does not hold the place in the data: it was taken before the script took its batches from session.batches. "
                "Name another directory with --run-dir, and --start-from this one, to begin with the first batch"
            )
        self.position = index

    # -- taking -------------------------------------------------------------------------------------------------------------

    def take(self, index: int) -> Any:
        """The batch, or the batches, of that number, counted from 0 over all epochs; those before are left out. OVER: there are none."""
        taken = OVER
        while self.position <= index:
            self.drain()
            first = self._first()
            if first is OVER:
                return OVER
            self.position += 1
            self._step = self._further()
            taken = first if self._accumulate == 1 else self._together(first)
        return taken

    def drain(self) -> None:
        """What the present step has left of its batches is used up."""
        for _ in self._step:
            pass

    def ends(self, following: int) -> bool:
        """Whether the present step is the last of its epoch, where the next one uses the batch of number `following`. UsageError where the
        loader does not know its length."""
        try:
            length = len(self._loader)  # type: ignore[arg-type]
        except TypeError:
            raise UsageError("session.epoch_ends: this loader does not know how many batches it gives") from None
        steps, done = (-(-batches // self._accumulate) for batches in (length, self.offset))
        return following - self.position >= steps - done

    def _first(self) -> Any:
        while True:
            if self._live is None:
                if self.epoch == self._epochs:
                    return OVER
                self._begin()
            for batch in self._taken(1):
                return batch
            if not self.offset:
                raise UsageError("session.batches: this loader gives no batch")
            self.epoch, self.offset, self._live = self.epoch + 1, 0, None

    def _together(self, first: Any) -> Iterator[Any]:
        yield first
        yield from self._step

    def _further(self) -> Iterator[Any]:
        return self._taken(self._accumulate - 1)

    def _taken(self, most: int) -> Iterator[Any]:
        """The next batches of this epoch."""
        for _ in range(most):
            assert self._live is not None
            try:
                batch = next(self._live)
            except StopIteration:
                return
            self.offset += 1
            if isinstance(batch, Made):
                self._workers[batch.worker] = batch.generators.state
                batch = batch.batch
                if self._every and self.offset % self._every == 0:
                    self._begun = dict(self._workers)
            yield batch

    # -- epochs -------------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._randomness is not None:
            self._start = {"rank": self._randomness.collect(), "own": collect_own(self._own)}
        self._kept_workers = getattr(self._loader, "_iterator", None) is not None and self._persistent
        if not self._kept_workers:
            self._workers = {}
        self._begun = dict(self._workers)
        self._set_epoch()
        self._live = self._iterator()

    @property
    def _persistent(self) -> bool:
        return bool(getattr(self._loader, "persistent_workers", False))

    def _set_epoch(self) -> None:
        if self._begin_epoch is not None:
            self._begin_epoch(self.epoch)
            return
        parts: dict[int, Any] = {id(part): part for part in self._parts if hasattr(part, "set_epoch")}
        for part in parts.values():
            part.set_epoch(self.epoch)

    def _iterator(self, **how: Any) -> Iterator[Any]:
        if self._view is not None:
            return self._view.iterate(**how)
        loader: Any = self._loader
        return iter(loader if hasattr(loader, "__iter__") else loader())

    # -- as a source of state -----------------------------------------------------------------------------------------------

    def collect(self) -> Nested:
        if self._owed is not None:
            return self._owed
        begun = self.offset > 0
        # One of torchdata's that has not begun draws a seed when it is asked.
        asked = self._stateful and (begun or self._view is None)
        loader: Any = self._loader
        return {
            "place": torch.tensor([*self._place, self.epoch, self.offset, self.position, self._kept_workers]),
            "start": self._start if begun else None,
            "own": collect_own(self._own),
            "workers": self._begun if begun else {},
            "loader": dict(loader.state_dict()) if asked else {},
        }

    def restore(self, kept: Nested) -> None:
        """`put_back` has to follow."""
        self._owed, self._live, self._step = kept, None, iter(())
        if self._view is not None:
            self._view.let_go()
        elif self._persistent:
            vars(self._loader)["_iterator"] = None

    def put_back(self) -> None:
        """Be where the restored state was. Draws from the rank's generators."""
        kept, self._owed = self._owed, None
        if kept is None:
            return
        rank, world, self.epoch, self.offset, self.position, kept_workers = kept["place"].tolist()
        ours = (rank, world) == self._place
        self._kept_workers, self._start = bool(kept_workers), kept["start"] if ours else None
        self._begun = dict(kept["workers"]) if ours else {}
        self._workers = dict(self._begun)
        loader: Any = self._loader
        if self.offset:
            self._to_start()
            self._set_epoch()
        if self._stateful:
            loader.load_state_dict(kept["loader"])
        if self.offset:
            self._again()
        if ours:
            restore_own(self._own, kept["own"])

    def _again(self) -> None:
        used = self.offset
        skip = used - used % (self._every or 1) if self._skips else 0
        before = self._to_start if self._kept_workers else None
        began_s = monotonic_s()
        self._live = self._iterator(**({"skip": skip, "states": self._begun, "before": before} if self._view else {}))
        if self._stateful:
            return
        self.offset = skip
        for _ in self._taken(used - skip):
            pass
        if not self._skips and not self._cost_told and self._place[0] == 0:
            self._cost_told = True
            print(
                f"mt-resilient: this loader can only be replayed from the start of its epoch. {used} batches were loaded again and "
                f"thrown away in {monotonic_s() - began_s:.1f} s. A DataLoader over a map-style dataset, or a loader with a state_dict, is "
                "put back without that",
                file=sys.stderr,
                flush=True,
            )

    def _to_start(self) -> None:
        """The generators as they were before this epoch's iterator was made."""
        if self._start is not None and self._randomness is not None:
            self._randomness.restore(self._start["rank"])
            restore_own(self._own, self._start["own"])
