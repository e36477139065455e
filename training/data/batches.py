"""The batches of a script's own loop, epoch after epoch, and the position in them as a part of the training state.

A data loader cannot tell its position. Only the beginning of an epoch can be repeated: the same generator states give the same order of
samples and the same seeds of workers. From there, the batches that were used are skipped (`loader_adapters.py`), and the workers'
generators are restored (`worker_rng.py`). Going to a position draws random numbers from the rank's generators. The caller restores these
generators afterwards.

The position is the same on all ranks, and is saved with the lineage. Everything else belongs to this rank alone, and is saved with the
rank's generators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch

from ...resilience.clock import monotonic_s
from ...resilience.errors import InternalError, LayoutError, UsageError
from ..state.rng import Randomness
from ..state.tensors.in_place import Nested
from .loader_adapters import ENDED, Loadable, Loader, refuse_kept_iterator
from .loader_rng import Draws
from .loader_state import Own
from .notices import Notices
from .skipping_sampler import draws_its_order
from .worker_start import NO_WORKERS, AtStart, behind_the_start

OVER = object()
"""Returned instead of a batch when there are no more batches."""
_NOTHING: Nested = {"start": None, "own": {}, "forked": NO_WORKERS, "workers": {}, "loader": {}, "draws": {}}
"""The saved state of a new rank, as after a change of the number of ranks."""


class Batches:
    def __init__(
        self, loader: Loadable, epochs: int | None, accumulate: int, begin_epoch: Callable[[int], None] | None
    ) -> None:
        """accumulate: the number of batches that a step uses. begin_epoch: called with the epoch's number before each epoch; by default
        `set_epoch` of each part of the loader. Raises UsageError for a loader that can be iterated only once."""
        self._loader = Loader(loader)
        self.epochs, self._accumulate = epochs, accumulate
        self.own = Own(self._loader.stateful, loader=loader, begin_epoch=begin_epoch)
        refuse_kept_iterator(*self.own.loaders_inside())
        self._set_epoch = begin_epoch or partial(self._loader.set_epoch, self.own.things())
        self._randomness: Randomness | None = None
        self._notices = Notices()
        self.epoch = 0
        """The epoch of the last batch, counted from 0."""
        self.offset = 0
        """The number of batches of this epoch that were used."""
        self.position = 0
        """The number of steps for which batches were used, over all epochs."""
        self._live: Iterator[Any] | None = None
        self._step: Iterator[Any] = iter(())
        """The batches of the present step that the loop has not used yet."""
        self._start: Nested | None = None
        """The states of the generators before this epoch's iterator was created."""
        self._samples: int | None = None
        """The number of samples in the dataset when this epoch began; None if not known."""
        self._promised: int | None = None
        """The number of steps of this epoch according to `len`."""
        self._kept_workers = False
        """Whether this epoch uses the workers of the previous epoch."""
        self._forked = AtStart(self.own.things(), loader if self._loader.tells else None)
        self.loaders = self._forked.loaders
        """The loaders with persistent workers."""
        self._begun: dict[int, Nested] = {}
        """The generator states of each worker, with which new workers have to begin."""
        self._draws = Draws()
        self._place: torch.Tensor | None = None
        self._kept: Nested | None = None
        """This rank's part of the state that `put_back` will apply."""

    def keep(self, randomness: Randomness, rank: int, is_given: Callable[[int], bool] = lambda _: False) -> None:
        """From now on, save what is needed to return to a position. Called before the first batch is taken. is_given: see `Own`."""
        self.own.is_given = is_given
        self._randomness, self._notices = randomness, Notices(rank == 0)
        self._draws = Draws(rank == 0)
        self._loader.listen()

    @property
    def owed(self) -> bool:
        """Whether a state was restored that `put_back` has not applied yet."""
        return self._place is not None

    def restored(self, index: int, same_job: bool) -> None:
        """Let the next step use batch `index`. If the restored state has no position in the data, the data begins with that batch. Raises
        LayoutError if that state is from the same job."""
        if self.owed:
            return
        if same_job:
            raise LayoutError(
                "the snapshot contains no position in the data: when it was taken, the script did not use session.batches. To begin with "
                "the first batch, run again with a new --run-dir, and give the present run directory to --start-from"
            )
        self.position = index

    def take(self, index: int) -> Any:
        """Return the batch (or batches) of step `index`, counted from 0 over all epochs. Earlier batches are skipped. Returns OVER if there
        are no more batches."""
        if index < self.position:  # an error, not the end of the data
            raise InternalError(f"batch {index} was requested, but the loader is already at batch {self.position}")
        taken = OVER
        while self.position <= index:
            self.drain()
            if (first := self._first()) is OVER:
                return OVER
            self.position += 1
            self._step = self._taken(self._accumulate - 1)
            taken = first if self._accumulate == 1 else chain((first,), self._step)
        return taken

    def drain(self) -> None:
        """Take the batches of the present step that the loop has not used."""
        for _ in self._step:
            pass

    def end(self) -> None:
        """Take no further batch. Persistent workers stay with the loader, as they do without a session. Other workers may end."""
        self._live, self._step = None, iter(())

    def ends(self, following: int) -> bool:
        """Return whether the present step is the last of its epoch, if the next step uses batch `following`. Raises UsageError if the
        loader does not know its length."""
        self._live = self._loader.present(self._live)
        try:
            length, certain = self._loader.length(self._live, self.offset)
        except TypeError:
            raise UsageError("session.epoch_ends: this loader does not know how many batches it gives") from None
        steps, done = (-(-batches // self._accumulate) for batches in (length, self.offset))
        self._promised = None if certain else steps
        return 0 <= steps - done <= following - self.position

    def _first(self) -> Any:
        while True:
            if self._live is None:
                if self.epochs is not None and self.epoch >= self.epochs:
                    return OVER
                self._begin()
            for batch in self._taken(1):
                return batch
            if not self.offset:
                raise UsageError("session.batches: this loader gives no batch")
            self._notices.ended(self._promised, -(-self.offset // self._accumulate))
            self.epoch, self.offset, self._live, self._promised = self.epoch + 1, 0, None, None

    def _taken(self, most: int) -> Iterator[Any]:
        """Yield at most `most` further batches of this epoch."""
        for _ in range(most):
            assert self._live is not None
            self._live = self._loader.present(self._live)
            try:
                batch = self._loader.heard.batch(self._next(self._live))
            except StopIteration:
                return
            self.offset += 1
            self._live = self._loader.onward(self._live)
            if self._randomness is not None:
                self._notices.lost(self._loader.heard.lost)
                self._loader.heard.lost.clear()
                if self._loader.every and self.offset % self._loader.every == 0:
                    self._begun = dict(self._loader.heard.states)
                self._loader.gave(batch, self.offset)
            yield batch

    def _next(self, live: Iterator[Any]) -> Any:
        if self._randomness is None or self._loader.skips or self._loader.stateful:
            return next(live)
        return self._draws.watched(self.offset, lambda: next(live))

    def _begin(self) -> None:
        """Begin the next epoch."""
        if self._randomness is not None:
            self._draws = self._draws.following()
        self._kept_workers = self._forked.look() or self._loader.keeps_workers
        if not self._kept_workers:
            self._loader.heard.states.clear()
        self._begun = dict(self._loader.heard.states)
        self._note_start()
        self._samples = None if self._start is None else self._loader.in_dataset()
        if self._start is not None and not self._kept_workers:
            self._forked.keep()
        self._live = self._loader.iterate(watched=self._draws.watched if self._randomness is not None else None)

    def place(self) -> torch.Tensor:
        here = [self.epoch, self.offset, self.position, self._kept_workers, self._loader.samples]
        return torch.tensor(here, device="cpu") if self._place is None else self._place

    def go_to(self, place: torch.Tensor) -> None:
        """Record the position to return to. The caller has to call `put_back` afterwards."""
        self._place, self._kept, self._live, self._step = place, None, None, iter(())
        self._loader.go_back()
        self._forked.let_go()

    def collect(self) -> Nested:
        """Return the part of the state that belongs to this rank alone."""
        if self._kept is not None:
            return self._kept
        begun = self.offset > 0 and not self.owed
        self._live = self._loader.present(self._live)
        own = self.own.collect()
        self._notices.lost(self.own.lost())
        idle = not self.owed and self._loader.idle(begun)
        return {
            "start": self._start if begun else None,
            "own": own,
            "forked": self._forked.state(),
            "workers": dict(self._loader.heard.states) if idle else self._begun if begun else {},
            "idle": idle,
            "over": begun and self._live is ENDED,
            "loader": {} if self.owed else self._loader.state(begun, self._live),
            "draws": dict(self._draws.kept) if begun else {},
            "checksum": self._loader.checksums.after(self.offset) if begun and not idle else None,
            "samples": self._samples if begun else None,
        }

    def restore(self, kept: Nested) -> None:
        self._kept = kept

    def put_back(self) -> None:
        """Go to the position of the restored state. Going there draws random numbers from the rank's generators."""
        self.epoch, self.offset, self.position, kept_workers, samples = self.place().tolist()
        kept, self._place, self._kept = self._kept or _NOTHING, None, None
        self._kept_workers, self._start = bool(kept_workers), kept["start"]
        forked = kept.get("forked", NO_WORKERS)
        self._forked.restore(forked)
        self._begun, self._loader.heard.states = dict(kept["workers"]), dict(kept["workers"])
        self._samples = kept.get("samples")
        if self.offset:
            self._to_start()  # the epoch may have a batch size of its own
            if samples and self._loader.samples:
                self.offset = self.offset * samples // self._loader.samples
            before, self._samples = self._samples, self._loader.in_dataset()
            if before is not None and self._samples is not None and before != self._samples:
                self._notices.grown(self._samples, before)
        of_the_loader: set[tuple[str, str]] = set()
        if kept["loader"]:
            of_the_loader = self.own.loaded(partial(self._loader.load, kept["loader"]))
        if kept.get("idle"):
            self._forked.put_back()
            self._loader.start(self._begun)
            self._live = iter(()) if self.offset else None
        elif self.offset:
            same = not (samples and self._loader.samples) or samples == self._loader.samples
            self._again(bool(kept["loader"]), kept.get("draws", {}), kept.get("checksum") if same else None)
            self._live = ENDED if kept.get("over") else self._live
        self._forked.start(forked["now"])
        if kept is not _NOTHING:
            self.own.restore_but(kept["own"], of_the_loader)
        elif self.offset and any(map(draws_its_order, self._loader.samplers())):
            self._notices.drawn_anew()

    def _again(self, goes_on: bool, drawn: dict[int, Nested], checksum: int | None) -> None:
        """Go to the position in the epoch. goes_on: whether the loader's own state brings it to the position. drawn: the states that
        `Draws` saved. checksum: the checksum of the used batches; None if not known."""
        self._draws = self._draws.following(drawn)
        used, every, began_s = self.offset, self._loader.every, monotonic_s()
        skip = used - used % (every or 1) if self._loader.skips else 0
        before = None
        if self._kept_workers:
            self._forked.put_back()
            if not self._loader.listens:
                self._to_start()
            before = behind_the_start(self._to_start)
        self._live = self._loader.iterate(skip, self._begun, before, self._draws.watched)
        if goes_on:
            return
        self.offset = skip
        for _ in self._taken(used - skip):
            pass
        self._draws.again = {}
        other_draws = self._kept_workers and not self._loader.listens
        if not self._loader.skips:
            self._notices.replayed(used, monotonic_s() - began_s, other_draws)
        if checksum is not None and not other_draws and self._loader.checksums.after(used) != checksum:
            self._notices.differs(used, self._loader.skips)

    def _note_start(self) -> None:
        """Call `begin_epoch` or `set_epoch`, and note the state before and after the call."""
        if self._randomness is not None:
            self._start = {"rank": self._randomness.collect(), "own": self.own.collect()}
        self._set_epoch(self.epoch)
        if self._start is not None:
            self._start["made"] = self.own.collect()

    def _to_start(self) -> None:
        """Restore everything to its state before this epoch's iterator was created."""
        if self._start is None or self._randomness is None:  # another number of ranks began this epoch
            self._note_start()
            self._forked.keep()
            return
        self._randomness.restore(self._start["rank"])
        self.own.restore(self._start["own"])
        self._set_epoch(self.epoch)
        self.own.restore(self._start["made"])  # begin_epoch may compute labels with the model, which has changed since
