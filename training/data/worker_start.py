"""What persistent workers were started with.

Such workers have the dataset and the collate function as these were when the workers were started. What the loop changes in them later
(`set_epoch`, `dataset.strength = …`) does not reach the workers. So the workers that replace them are started from the same values:

the first epoch: values ─▶ kept ─▶ workers          a recovery: kept ─▶ values ─▶ workers; then the values of the restored step

A start of workers draws a seed from the rank's generators; a further pass by the same workers draws none. So a recovery starts the workers
that had been started, and what this start draws does not count. `Started` does this for loaders that `session.batches` does not know, such
as one for an evaluation.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ..state.tensors.in_place import Nested
from .loader_state import Own

_SENT = ("dataset", "collate_fn", "worker_init_fn")
"""Attributes of a loader that its workers get."""


class AtStart:
    def __init__(self, things: Iterable[Any], listened: Any) -> None:
        """things: what the loader consists of. Other loaders with persistent workers may be among it. listened: the loader whose workers
        report their generators, which is restored otherwise."""
        self.loaders = stays = [each for each in things if isinstance(each, DataLoader) and each.persistent_workers]
        self._own = Own(**{f"{at}.{name}": getattr(each, name) for at, each in enumerate(stays) for name in _SENT})
        self._others: list[Any] = [each for each in stays if each is not listened and not hasattr(each, "state_dict")]
        self._kept: Nested | None = None
        """None: no workers were started."""
        self._before: list[bool] = []
        """For each other loader: whether it had workers when the epoch began."""

    def look(self) -> bool:
        """Called at the beginning of an epoch. Returns whether another loader has workers of the epoch before."""
        self._before = self._have_workers()
        return any(self._before)

    def _have_workers(self) -> list[bool]:
        return [each._iterator is not None for each in self._others]

    def keep(self) -> None:
        """Keep what workers get. Called right before workers are started."""
        self._kept = self._own.collect()

    def state(self) -> Nested:
        return {"own": self._kept, "before": self._before, "now": self._have_workers()}

    def restore(self, state: Nested) -> None:
        self._kept, self._before = state["own"], state["before"]

    def let_go(self) -> None:
        """Release the workers of other loaders: a recovery starts them again, as in a new process."""
        for each in self._others:
            each._iterator = None

    def put_back(self) -> None:
        """Restore all that workers get to what it was when the workers were started. Start the workers of other loaders: what this draws
        does not belong to the epoch."""
        if self._kept is not None:
            self._own.restore(self._kept)
        self.start(self._before)

    def start(self, had_workers: list[bool]) -> None:
        """Start workers of other loaders that had some, and have none."""
        for each, had in zip(self._others, had_workers, strict=False):
            if had and each._iterator is None:
                each._iterator = start(each)


_Key = tuple[str, int]
"""Identifies a loader, also after a restart: its description, and its number among loaders of that description, in the order of their first
start."""


class Started:
    """The loaders outside of `session.batches` that have started persistent workers. A source of state, of this rank alone."""

    def __init__(self, made: Callable[[Any], None]) -> None:
        """made: called with each iterator that a DataLoader makes."""
        self._tell_of = made
        self.apart: Sequence[Any] = ()
        """Loaders that other code looks after."""
        self._known: dict[_Key, weakref.ref[Any]] = {}
        self._owed: set[_Key] = set()
        """Loaders that had workers in the restored state, and have none yet."""
        self._there: list[weakref.ref[Any]] | None = None
        """The loaders that existed at the restore: an owed one is among them. A loader that the loop makes anew each time has had no
        workers."""
        self.notice()

    def notice(self) -> None:
        """Notice each start of a loader from now on."""
        global _original
        _original = _original or DataLoader._get_iterator
        DataLoader._get_iterator = functools.wraps(_original)(lambda loader: self._made(loader))  # type: ignore[method-assign]

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
            self._there = [weakref.ref(each) for each in gc.get_objects() if issubclass(type(each), DataLoader)]

    def _live(self) -> Iterator[tuple[_Key, Any]]:
        for key, reference in self._known.items():
            loader = reference()
            if loader is not None and not any(loader is each for each in self.apart):
                yield key, loader

    def _made(self, loader: Any) -> Any:
        """Return what torch's own `_get_iterator` returns. If the loader had workers in the restored state, what their start draws does not
        count."""
        if getattr(loader, "persistent_workers", False) and not any(loader is each for each in self.apart):
            key = self._key(loader)
            if key in self._owed:
                self._owed.remove(key)
                iterator = start(loader)
                iterator._reset(loader)
                return iterator
        iterator = _original(loader)
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
    """Return a description of the loader, as far as it is the same after a restart."""
    dataset = loader.dataset
    kinds: Iterable[Any] = map(type, (loader, dataset, loader.sampler, loader.batch_sampler))
    try:
        length = -1 if isinstance(dataset, IterableDataset) else len(dataset)
    except Exception:  # from a class of the script
        length = -1
    figures = length, loader.batch_size, loader.num_workers, loader.drop_last
    return " ".join([*(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds), *map(str, figures)])


def start(loader: Any) -> Any:
    """Return an iterator with its workers, which load nothing yet. What the start draws does not count."""
    held, which = vars(loader), "sampler" if loader.batch_sampler is None else "batch_sampler"
    generator = loader.generator or torch.default_generator
    drawn, theirs, held[which] = generator.get_state(), held[which], []
    try:
        iterator = loader._get_iterator()
    finally:
        held[which] = theirs
        generator.set_state(drawn)
    iterator._index_sampler = loader._index_sampler
    return iterator


def behind_the_start(then: Callable[[], None]) -> Callable[[], None]:
    """Return a function to be called where a sampler begins; it calls `then` from the second time on. A new iterator of torch's begins its
    sampler before it starts workers, and again after that."""
    calls = iter((lambda: None,))
    return lambda: next(calls, then)()
