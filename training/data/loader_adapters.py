"""What a loop takes its batches from, by sort: how it is gone through from some batch of an epoch on.

a DataLoader over a map          its sampler leaves the first batches out: nothing of them is loaded
what has a state_dict            it goes on by itself, from its state
anything else                    from the start of the epoch only: the first batches have to be loaded again
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ...resilience.errors import UsageError
from .checksums import Checksums, of_batch
from .script_code import goes_on_with, of_script
from .skipping_sampler import Behind, Watched, draws_at_its_start
from .worker_rng import Beginning, Heard, Telling, listen_to
from .worker_start import start

ENDED: Iterator[Any] = iter(())
"""In place of an iterator that has no more."""
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
            if not (self._plain and name == "_iterator") and goes_on_with(kind, name)
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
        self._beginning = Beginning()
        self._behind = Behind(())
        self._checksums = Checksums()
        self.tells = self._plain or (self._torchs and self.stateful)
        """Its workers can tell their generators,"""
        self.listens = False
        """and do:"""
        self.heard = Heard()

    def listen(self) -> None:
        """From now on its workers tell their generators, and batches can be left out."""
        self.listens = self.tells
        if self._plain:
            self._behind = Behind(getattr(self.thing, self._which))

    @property
    def _which(self) -> str:
        return "sampler" if self.thing.batch_sampler is None else "batch_sampler"

    @contextmanager
    def _listened_to(self) -> Iterator[None]:
        """While an iterator is made, which takes what it needs of the loader: then its functions are ours, around those that the script has
        given it by now. Before and after, the loader is as the script has it. The script may go through it too, as in a loop without us."""
        if not self.listens:
            yield
            return
        held, ours = vars(self.thing), dict[str, Any]()
        if self.thing.num_workers:
            self._beginning.begin, self._beginning.collate = self.thing.worker_init_fn, self.thing.collate_fn
            self._beginning.stays = stays = self.thing.persistent_workers
            ours |= {"worker_init_fn": self._beginning, "collate_fn": Telling(self.thing.collate_fn, stays)}
        if self._plain:
            ours |= {self._which: self._behind}
        theirs = {name: held[name] for name in ours if name in held}
        held.update(ours)
        try:
            yield
        finally:
            for name in ours:
                held.pop(name)
            held.update(theirs)

    def length(self, live: Any, used: int) -> tuple[int, bool]:
        """Batches of this epoch, of which the iterator `live` has given `used`; and whether that is certain. Raises TypeError where nothing
        tells it."""
        if live is ENDED:
            return used, True
        if not (self.skips and hasattr(live, "_rcvd_idx")):
            return len(self.thing), False
        # Workers are told so many batches ahead, and fewer only where the sampler has no more.
        rest = live._send_idx - live._rcvd_idx
        if rest < live._prefetch_factor * live._num_workers:
            return used + rest, True
        try:
            return max(used + rest, len(self.thing)), False
        except TypeError:
            return used + rest, False

    def onward(self, live: Any) -> Any:
        """The iterator that has just given a batch; ENDED where that was the last one. Workers that stay have one iterator for all that go
        through the loader. What the loop does in the last step of an epoch may begin a pass of its own with it, as behind the epoch of a
        loop without us."""
        stays = self._plain and self.thing.persistent_workers and live is getattr(self.thing, "_iterator", None)
        if not stays or live._send_idx > live._rcvd_idx:
            return live
        next(live, None)
        return ENDED

    @property
    def checksums(self) -> Checksums:
        """Of the batches of this epoch: of a sampler's where there is one, otherwise of the loader's own."""
        return self._behind.checksums if self.skips else self._checksums

    def gave(self, batch: Any, used: int) -> None:
        """The batch of that number, counted from 1."""
        if not (self.skips or self.stateful):
            self._checksums.add(of_batch(batch))
        self.checksums.after(used)

    def in_dataset(self) -> int | None:
        """Samples of all ranks together; None: not known."""
        dataset = getattr(self.thing, "dataset", None)
        try:
            return None if dataset is None else len(dataset)
        except Exception:  # the script's own, and it goes on without it
            return None

    @property
    def samples(self) -> int:
        """In a batch of all ranks together; 0: not known."""
        batches = getattr(self.thing, "batch_sampler", None)
        replicas = max((int(getattr(sampler, "num_replicas", 1)) for sampler in self._samplers()), default=1)
        return int(getattr(batches, "batch_size", None) or getattr(self.thing, "batch_size", None) or 0) * replicas

    def _samplers(self) -> list[Any]:
        batches = getattr(self.thing, "batch_sampler", None)
        found = (getattr(self.thing, "sampler", None), getattr(batches, "sampler", None), batches)
        return [sampler for sampler in found if sampler is not None]

    @property
    def keeps_workers(self) -> bool:
        """Of the epoch before, for the next one."""
        stay = getattr(self.thing, "persistent_workers", False)
        return bool(stay) and getattr(self.thing, "_iterator", None) is not None

    def idle(self, begun: bool) -> bool:
        """Its workers wait for another pass than this epoch's: that has not begun, or is over, as the script has begun one."""
        return self._plain and self.listens and self.keeps_workers and (self._behind.taken_over or not begun)

    def set_epoch(self, within: Iterable[Any], epoch: int) -> None:
        """within: what the loader consists of: a progress bar may be around it, and the sampler deep in it."""
        batches = getattr(self.thing, "batch_sampler", None)
        inner = (getattr(self.thing, name, None) for name in ("sampler", "dataset"))
        further = (part for part in within if isinstance(part, Sampler))
        parts = (self.thing, batches, getattr(batches, "sampler", None), *inner, *further)
        once: dict[int, Any] = {id(part): part for part in parts if hasattr(part, "set_epoch")}
        for part in once.values():
            part.set_epoch(epoch)

    def iterate(
        self,
        skip: int = 0,
        states: Mapping[int, Any] | None = None,
        before: Callable[[], None] | None = None,
        watched: Watched | None = None,
    ) -> Iterator[Any]:
        """The batches of the next epoch; where it `skips`, after the first `skip`. states: of new workers' generators. before: called right
        before a sampler begins. watched: gives what a call gives for the batch of that number, and knows what is drawn for it."""
        self._beginning.states, self._checksums = states or {}, Checksums()
        self._behind.skip, self._behind.before = skip, before
        draws = self.skips and not all(map(draws_at_its_start, self._samplers()))
        self._behind.watched = watched if draws else None  # of other loaders each batch is watched already
        if self._plain and self.listens and self.keeps_workers:  # the script may have started them
            self.thing._iterator._index_sampler = self._behind
        with self._listened_to(), self._behind.ours(), _restarts_nothing(self.thing):
            live = iter(self.thing if hasattr(self.thing, "__iter__") else self.thing())
        self._hear(live)
        self._behind.leave_out()
        return live

    def start(self, states: Mapping[int, Any]) -> None:
        """Workers that stay, with these generators, for whoever goes through it next."""
        self._beginning.states = states
        with self._listened_to():
            self.thing._iterator = start(self.thing)
        self._hear(self.thing._iterator)
        self._behind.taken_over = True

    def _hear(self, live: Any) -> None:
        if self.listens and self.thing.num_workers:
            listen_to(live, self.heard)

    def go_back(self) -> None:
        """The iterator that there is has gone too far."""
        if (self.stateful or self._plain) and hasattr(self.thing, "_iterator"):
            vars(self.thing)["_iterator"] = None

    def state(self, begun: bool) -> dict[str, Any]:
        """Its own; empty: it has none. (One of torchdata's that has not begun draws a seed when it is asked. One of the script's that has
        ended a pass may take what it loads for a place in the next one; its attributes are put back anyhow.)"""
        kind: Any = type(self.thing)
        asked = begun or not (self._torchs or of_script(kind))
        return dict(self.thing.state_dict()) if self.stateful and asked else {}


@contextmanager
def _restarts_nothing(loader: Any) -> Iterator[None]:
    """torchdata's loader of nodes, put back to the end of an epoch, begins the next one by itself: not so here."""
    name = "restart_on_stop_iteration"
    held = vars(loader) if hasattr(loader, name) else {}
    kept = {name: held[name]} if name in held else {}
    held.update(dict.fromkeys(kept, False))
    try:
        yield
    finally:
        held.update(kept)
