"""The values with which persistent workers were started.

Persistent workers have copies of the dataset and the collate function from the time of their start. Later changes by the loop (`set_epoch`,
`dataset.strength = …`) do not reach the workers. So a recovery starts the new workers from the same values:

the first epoch: values ─▶ saved ─▶ workers          a recovery: saved ─▶ values ─▶ workers; then the values of the restored step

A start of workers draws a seed from the rank's generators. A further pass by the same workers draws none. So a recovery starts all workers
that had been started, and then restores the generators. `Started` does this for loaders that `session.batches` does not know, such as a
loader for an evaluation.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..live_instances import live_instances
from ..state.tensors.in_place import Nested
from .loader_state import Own

_SENT = ("dataset", "collate_fn", "worker_init_fn")
"""Attributes of a loader that are copied to its workers."""

NO_WORKERS: Nested = {"own": None, "before": [], "now": []}
"""What `AtStart.state` returns before any workers have started."""


class AtStart:
    def __init__(self, things: Iterable[Any], listened: Any) -> None:
        """things: the objects in the loader, which may include further loaders with persistent workers. listened: the loader whose workers
        report their generators; other code restores its workers."""
        self.loaders = stays = [each for each in things if isinstance(each, DataLoader) and each.persistent_workers]
        self._own = Own(**{f"{at}.{name}": getattr(each, name) for at, each in enumerate(stays) for name in _SENT})
        self._others: list[Any] = [each for each in stays if each is not listened and not hasattr(each, "state_dict")]
        self._kept: Nested | None = None
        """The values from the start of the workers. None: no workers were started."""
        self._before: list[bool] = []
        """Whether each other loader had workers when the epoch began."""

    def look(self) -> bool:
        """Return whether another loader has workers of the previous epoch. Called at the beginning of an epoch."""
        self._before = self._have_workers()
        return any(self._before)

    def _have_workers(self) -> list[bool]:
        return [each._iterator is not None for each in self._others]

    def keep(self) -> None:
        """Save the values that workers get. Called right before workers are started."""
        self._kept = self._own.collect()

    def state(self) -> Nested:
        return {"own": self._kept, "before": self._before, "now": self._have_workers()}

    def restore(self, state: Nested) -> None:
        self._kept, self._before = state["own"], state["before"]

    def let_go(self) -> None:
        """Release the workers of other loaders. A recovery starts them again, as a new process does."""
        for each in self._others:
            each._iterator = None

    def put_back(self) -> None:
        """Restore the values that workers get to those of the workers' start. After that, start the workers of other loaders that had been
        started. The caller restores the generators from which these starts draw."""
        if self._kept is not None:
            self._own.restore(self._kept)
        self.start(self._before)

    def start(self, had_workers: list[bool]) -> None:
        """Start the workers of each other loader that had workers and has none now."""
        for each, had in zip(self._others, had_workers, strict=False):
            if had and each._iterator is None:
                each._iterator = start(each)


_Key = tuple[str, int]
"""Identifies a loader, also after a restart: its description, and its number among loaders of the same description, counted by first
start."""


class Started:
    """The loaders outside of `session.batches` that have started persistent workers, as a source (a saved object) of this rank alone."""

    def __init__(self, made: Callable[[Any], None]) -> None:
        """made: called with each iterator that a DataLoader creates."""
        self._tell_of = made
        self.apart: Sequence[Any] = ()
        """Loaders that other code saves."""
        self._known: dict[_Key, weakref.ref[Any]] = {}
        self._owed: set[_Key] = set()
        """Loaders that had workers in the restored state and have not started any yet."""
        self._there: list[weakref.ref[Any]] | None = None
        """The loaders that existed at the restore. Only loaders in this list can match entries of `_owed`: a loader that the loop creates
        later had no workers in the restored state."""
        self.notice()

    def notice(self) -> None:
        """From now on, call `_made` at each start of a loader."""
        global _original
        _original = _original or DataLoader._get_iterator
        self._ours = functools.wraps(_original)(lambda loader: self._made(loader))
        DataLoader._get_iterator = self._ours  # type: ignore[method-assign]

    def release(self) -> None:
        """Undo `notice`, when the loop has ended. Loaders of `_owed` may still start their workers after the loop. Other code may have
        replaced the function since then, and call ours."""
        global _original
        self._tell_of = lambda _: None
        if not self._owed and DataLoader._get_iterator is self._ours:
            DataLoader._get_iterator, _original = _original, None  # type: ignore[method-assign]

    def collect(self) -> Nested:
        return {"had": sorted({*self._owed, *(key for key, loader in self._live() if loader._iterator is not None)})}

    def restore(self, kept: Nested) -> None:
        had = {(like, number) for like, number in kept["had"]}
        self._owed = had - self._known.keys()
        for key, loader in self._live():
            if key not in had:
                loader._iterator = None
            elif loader._iterator is None:
                self._owed.add(key)
        if self._owed and self._there is None:
            self._there = [*map(weakref.ref, live_instances(DataLoader))]

    def _live(self) -> Iterator[tuple[_Key, Any]]:
        for key, reference in self._known.items():
            loader = reference()
            if loader is not None and not any(loader is each for each in self.apart):
                yield key, loader

    def _made(self, loader: Any) -> Any:
        """Return what torch's own `_get_iterator` returns. If the loader had workers in the restored state, the random numbers drawn by
        their start are undone."""
        owed = False
        if getattr(loader, "persistent_workers", False) and not any(loader is each for each in self.apart):
            key = self._key(loader)
            owed = key in self._owed
            self._owed.discard(key)
        iterator = start(loader, _original) if owed else _original(loader)
        if owed:
            iterator._reset(loader)
        self._tell_of(iterator)
        return iterator

    def _key(self, loader: Any) -> _Key:
        for key, known in self._live():
            if known is loader:
                return key
        like = _like(loader)
        number = 1 + max((number for other, number in {*self._known, *self._owed} if other == like), default=-1)
        if any(each() is loader for each in self._there or ()):
            number = min((number for other, number in self._owed if other == like), default=number)
        self._known[like, number] = weakref.ref(loader)
        return like, number


_original: Any = None
"""torch's own `DataLoader._get_iterator`."""


def _like(loader: Any) -> str:
    """Return a description of the loader that a restart does not change."""
    dataset = loader.dataset
    kinds: Iterable[Any] = map(type, (loader, dataset, loader.sampler, loader.batch_sampler))
    try:
        length = -1 if isinstance(dataset, IterableDataset) else len(dataset)
    except Exception:  # raised by a class of the script
        length = -1
    figures = length, loader.batch_size, loader.num_workers, loader.drop_last
    return " ".join([*(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds), *map(str, figures)])


class _Later:
    """A loader's sampler that is empty while the loader starts its workers. `then`: the sampler from then on."""

    then: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.then)

    def __len__(self) -> int:
        return len(self.then)  # type: ignore[arg-type]


def start(loader: Any, make: Callable[[Any], Any] | None = None) -> Any:
    """Return an iterator whose workers are started but load nothing yet. The generator's state is restored after the start. make: creates
    the iterator; by default the loader itself, which may put an iterator of its own around torch's."""
    held, which = vars(loader), "sampler" if loader.batch_sampler is None else "batch_sampler"
    generator = loader.generator or torch.default_generator
    drawn, theirs, later = generator.get_state(), held[which], _Later()
    held[which] = later
    try:
        iterator = make(loader) if make else loader._get_iterator()
    finally:
        held[which] = theirs
        generator.set_state(drawn)
    later.then = loader._index_sampler
    if isinstance(iterator, _BaseDataLoaderIter):
        iterator._index_sampler = later.then
    return iterator


def behind_the_start(then: Callable[[], None]) -> Callable[[], None]:
    """Return a function to be called when a sampler begins, which calls `then` from its own second call on. A new iterator of torch's
    begins its sampler twice: before it starts workers, and after that."""
    calls = iter((lambda: None,))
    return lambda: next(calls, then)()
