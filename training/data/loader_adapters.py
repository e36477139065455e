"""The kinds of objects from which a loop takes batches, and how each kind continues from a given batch of an epoch.

a DataLoader over a map          its sampler skips the first batches, which are not loaded
an object with a state_dict      it continues from its own saved state
anything else                    it starts at the epoch's first batch: the used batches are loaded again
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
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
"""Stands for an iterator that has no more batches."""
_ALONE = "mt_resilient.state"
"""The name for a loader's state that is no mapping."""
Loadable = Iterable[Any] | Callable[[], Iterable[Any]]


class Loader:
    def __init__(self, loader: Loadable) -> None:
        """Raises UsageError for an object that can be iterated only once."""
        self.thing: Any = loader
        kind: Any = type(loader)  # isinstance would also accept Accelerate's loaders
        self._torchs = issubclass(kind, DataLoader)
        passes = self._torchs and kind.__iter__ is DataLoader.__iter__
        reports = self._torchs and _has_torchs_iterator(kind)
        self._plain = passes and (reports or not getattr(loader, "num_workers", 0))
        self.stateful = _has_state(loader)
        if isinstance(loader, Iterator) and not self.stateful:
            raise UsageError(
                f"session.batches was given a {kind.__name__}, which can be iterated only once. A rewind needs its batches again. "
                "Pass the function that creates it, without calling the function"
            )
        refuse_kept_iterator(loader)
        dataset = getattr(self.thing, "dataset", None)
        over_map = not isinstance(dataset, IterableDataset)
        self.skips = self._plain and over_map
        """Whether batches can be skipped without loading them."""
        self.every = 0
        """New workers can begin only after a multiple of this number of batches. For a loader that skips batches, all workers have then
        made equally many batches, and the first worker makes the next one. A loader with a state can return only to such positions. 0: new
        workers can begin only at the beginning of an epoch."""
        if self.stateful and (over_map or hasattr(dataset, "state_dict")):
            self.every = getattr(self.thing, "snapshot_every_n_steps", 1)
        elif self.skips:
            self.every = int(getattr(loader, "num_workers", 0))
        self._beginning = Beginning()
        self._behind = Behind(())
        self._checksums = Checksums()
        self.tells = self._plain or (reports and self.stateful)
        """Whether the loader's workers can report the states of their generators."""
        self._pass: Any = None
        """The sampler's iterator in the present pass of persistent workers. A new pass has another one."""
        self.listens = False
        """Whether the workers report these states. `heard` receives them."""
        self.heard = Heard()

    def listen(self) -> None:
        """From now on, the loader's workers report their generators, and batches can be skipped."""
        self.listens = self.tells
        if self._plain:
            self._behind = Behind(getattr(self.thing, self._which))

    @property
    def _which(self) -> str:
        return "sampler" if self.thing.batch_sampler is None else "batch_sampler"

    @contextmanager
    def _listened_to(self) -> Iterator[None]:
        """While this block creates an iterator, the loader uses the session's functions, which wrap the functions that the script has set.
        Before and after, the loader has the script's functions. So the script may iterate over the loader too, as without a session."""
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
        """Return the number of batches in this epoch, and whether the number is certain. The iterator `live` has given `used` batches so
        far. Raises TypeError if the number is not known."""
        if live is ENDED:
            return used, True
        if not (self.skips and hasattr(live, "_rcvd_idx")):
            return len(self.thing), False
        # The iterator asks the workers for this many batches ahead. It asks for fewer only if the sampler has no more.
        rest = live._send_idx - live._rcvd_idx
        if rest < live._prefetch_factor * live._num_workers:
            return used + rest, True
        try:
            return max(used + rest, len(self.thing)), False
        except TypeError:
            return used + rest, False

    def onward(self, live: Any) -> Any:
        """Return the iterator that has just given a batch; ENDED if that batch was the last. Persistent workers have one iterator for all
        passes over the loader. So in the last step of an epoch, the script may use this iterator for a pass of its own, as without a
        session."""
        stays = self.keeps_workers and live is self.thing._iterator
        self._pass = _pass_of(live) if stays else None
        if not (stays and self._plain) or live._send_idx > live._rcvd_idx:
            return live
        next(live, None)
        return ENDED

    def present(self, live: Any) -> Any:
        """Return the iterator of the loop's pass; ENDED if the script has begun a pass of its own with that iterator."""
        return ENDED if self._pass is not None and _pass_of(live) not in (self._pass, None) else live

    @property
    def checksums(self) -> Checksums:
        """The checksums of this epoch's batches: the sampler's if the loader skips, otherwise the loader's own."""
        return self._behind.checksums if self.skips else self._checksums

    def gave(self, batch: Any, used: int) -> None:
        """Record that the loader gave this batch. used: the batch's number, counted from 1."""
        if not (self.skips or self.stateful):
            self._checksums.add(of_batch(batch))
        self.checksums.after(used)

    def in_dataset(self) -> int | None:
        """Return the number of samples in the dataset for all ranks together; None if not known."""
        dataset = getattr(self.thing, "dataset", None)
        try:
            return None if dataset is None else len(dataset)
        except Exception:  # raised by a class of the script: the loop works without the number
            return None

    @property
    def samples(self) -> int:
        """The number of samples in a batch, for all ranks together; 0 if not known."""
        batches = getattr(self.thing, "batch_sampler", None)
        replicas = max((_number(sampler, "num_replicas") for sampler in self.samplers()), default=1)
        return (_number(batches, "batch_size") or _number(self.thing, "batch_size")) * (replicas or 1)

    def samplers(self) -> list[Any]:
        batches = getattr(self.thing, "batch_sampler", None)
        found = (getattr(self.thing, "sampler", None), getattr(batches, "sampler", None), batches)
        return [sampler for sampler in found if sampler is not None]

    @property
    def keeps_workers(self) -> bool:
        """Whether the workers of the previous epoch also make the batches of the next epoch."""
        stay = getattr(self.thing, "persistent_workers", False)
        return bool(stay) and getattr(self.thing, "_iterator", None) is not None

    def idle(self, begun: bool) -> bool:
        """Return whether the workers wait for a pass other than this epoch's: this epoch has not begun, or is over because the script has
        begun a pass of its own."""
        return self._plain and self.listens and self.keeps_workers and (self._behind.taken_over or not begun)

    def set_epoch(self, within: Iterable[Any], epoch: int) -> None:
        """Call `set_epoch` of each part that has the method. within: the objects in the loader. A progress bar may wrap the loader, and the
        sampler may be deep inside."""
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
        """Return an iterator over the next epoch. If the loader `skips`, its first `skip` batches are skipped. states: generator states for
        new workers. before: called right before a sampler begins. watched: calls a function that takes a numbered batch, and records the
        random numbers drawn for it."""
        self._beginning.states, self._checksums, self._pass = states or {}, Checksums(), None
        self._behind.skip, self._behind.before = skip, before
        draws = self.skips and not all(map(draws_at_its_start, self.samplers()))
        self._behind.watched = watched if draws else None  # other loaders' batches are already watched elsewhere
        if self._plain and self.listens and self.keeps_workers:  # the script may have started the workers
            self.thing._iterator._index_sampler = self._behind
        # Otherwise, torchdata's loader of nodes would begin the next epoch if it was restored to the end of an epoch.
        with self._listened_to(), self._behind.ours(), _holding(self.thing, "restart_on_stop_iteration", False):
            live = iter(self.thing if hasattr(self.thing, "__iter__") else self.thing())
        self._hear(live)
        self._behind.leave_out()
        return live

    def start(self, states: Mapping[int, Any]) -> None:
        """Start persistent workers with these generator states, for the next pass over the loader. The loop or the script may make that
        pass."""
        self._beginning.states = states
        with self._listened_to():
            self.thing._iterator = start(self.thing)
        self._hear(self.thing._iterator)
        self._behind.taken_over = True

    def _hear(self, live: Any) -> None:
        if self.listens and self.thing.num_workers:
            listen_to(live, self.heard)

    def go_back(self) -> None:
        """Drop the present iterator, because it is beyond the wanted position."""
        if (self.stateful or self._plain) and hasattr(self.thing, "_iterator"):
            vars(self.thing)["_iterator"] = None

    def state(self, begun: bool, live: Any) -> dict[str, Any]:
        """Return the loader's own state; empty if it has none, or if the script has begun a pass of its own with the loop's iterator.
        live: the iterator of the loop's pass. (A torchdata loader that has not begun draws a seed when its state is read. A script's loader
        that has ended a pass may take the loaded state for a position in the next pass. The attributes of the script's loader are restored
        in any case.)"""
        kind: Any = type(self.thing)
        asked = (begun or not (self._torchs or of_script(kind))) and live is not ENDED
        torchs = self._torchs and isinstance(live, _BaseDataLoaderIter)
        with _holding(self.thing, "_iterator", live) if torchs else nullcontext():  # the script may use another one
            found = self.thing.state_dict() if self.stateful and asked else None
        if isinstance(found, Mapping):
            return dict(found)
        return {} if found is None else {_ALONE: found}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the loader's own state."""
        self.thing.load_state_dict(state[_ALONE] if [*state] == [_ALONE] else state)


def _has_state(loader: Any) -> bool:
    # Accelerate's loaders always have both methods, and read one batch ahead of the loop.
    adapts = hasattr(loader, "use_stateful_dataloader")
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") and not adapts


def refuse_kept_iterator(*loaders: Any) -> None:
    """Raise UsageError for a loader that keeps one iterator from epoch to epoch."""
    for loader in loaders:
        kind: Any = type(loader)
        passes = issubclass(kind, DataLoader) and kind.__iter__ is DataLoader.__iter__
        if not _has_state(loader) and any(
            isinstance(part, _BaseDataLoaderIter)
            for name, part in getattr(loader, "__dict__", {}).items()
            if not (passes and name == "_iterator") and goes_on_with(kind, name)
        ):
            raise UsageError(
                f"session.batches was given a {kind.__name__}, which keeps one iterator from epoch to epoch. A rewind cannot restore "
                "that iterator. Pass a DataLoader with persistent_workers=True, which also keeps its workers"
            )


def _number(thing: Any, name: str) -> int:
    """Return the attribute's number; 0 if there is none. (A batch sampler may have a batch size for each length.)"""
    try:
        return int(getattr(thing, name, 0))
    except (TypeError, ValueError):
        return 0


def _pass_of(live: Any) -> Any:
    """Return the sampler's iterator in torch's iterator, or in one that another package (PyG) has put around torch's."""
    inner = (live, *getattr(live, "__dict__", {}).values())
    return next((each._sampler_iter for each in inner if isinstance(each, _BaseDataLoaderIter)), None)


def _has_torchs_iterator(kind: type) -> bool:
    """Whether torch or torchdata makes the iterators of this class of loaders. Another package's iterator (PyG's, for example) may change
    each batch, and would get the workers' reports with it."""
    owner = next(each for each in kind.__mro__ if "_get_iterator" in vars(each))
    return owner.__module__.partition(".")[0] in ("torch", "torchdata")


@contextmanager
def _holding(loader: Any, name: str, value: Any) -> Iterator[None]:
    """Within this block, the loader's attribute has this value. A loader without the attribute gets none."""
    held = vars(loader) if hasattr(loader, name) else {}
    kept = {name: held[name]} if name in held else {}
    held.update(dict.fromkeys(kept, value))
    try:
        yield
    finally:
        held.update(kept)
