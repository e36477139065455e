"""What workers that stay from epoch to epoch were started with.

Such workers have the dataset and the collate function as these were where the workers were started. What the loop changes in them later
(`set_epoch`, `dataset.strength = …`) does not reach the workers. So workers in their place are started from the same values:

the first epoch: values ─▶ kept ─▶ workers          a recovery: kept ─▶ values ─▶ workers; then the values of the restored step
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.data import DataLoader

from ..state.tensors.in_place import Nested
from .loader_state import Own

_SENT = ("dataset", "collate_fn", "worker_init_fn")
"""Of a loader: what its workers get."""


class AtStart:
    def __init__(self, things: Iterable[Any], listened: Any) -> None:
        """things: what the loader consists of: it may go through other loaders with such workers. listened: the one whose workers tell
        their generators, which is put back otherwise."""
        stays = [each for each in things if isinstance(each, DataLoader) and each.persistent_workers]
        self._own = Own(**{f"{at}.{name}": getattr(each, name) for at, each in enumerate(stays) for name in _SENT})
        self._others: list[Any] = [each for each in stays if each is not listened and not hasattr(each, "state_dict")]
        self._kept: Nested | None = None
        """None: no workers were started."""
        self._before: list[bool] = []
        """Of each other loader: whether it had workers when the epoch began."""

    def look(self) -> bool:
        """At the begin of an epoch; whether another loader has workers of the one before."""
        self._before = self._have_workers()
        return any(self._before)

    def _have_workers(self) -> list[bool]:
        return [each._iterator is not None for each in self._others]

    def keep(self) -> None:
        """To be called right before workers are started."""
        self._kept = self._own.collect()

    def state(self) -> Nested:
        return {"own": self._kept, "before": self._before, "now": self._have_workers()}

    def restore(self, state: Nested) -> None:
        self._kept, self._before = state["own"], state["before"]

    def let_go(self) -> None:
        """Of the workers of other loaders: a recovery starts them again, as in a new process."""
        for each in self._others:
            each._iterator = None

    def put_back(self) -> None:
        """All that workers get is what it was where those that were kept were started. Other loaders' workers are started: what that draws
        does not belong to the epoch."""
        if self._kept is not None:
            self._own.restore(self._kept)
        self.start(self._before)

    def start(self, had_workers: list[bool]) -> None:
        """Workers of other loaders that had some, and have none."""
        for each, had in zip(self._others, had_workers, strict=False):
            if had and each._iterator is None:
                _start(each)


def _start(loader: Any) -> None:
    """Its workers, which load nothing yet."""
    held, which = vars(loader), "sampler" if loader.batch_sampler is None else "batch_sampler"
    theirs, held[which] = held[which], []
    try:
        loader._iterator = loader._get_iterator()
    finally:
        held[which] = theirs
    loader._iterator._index_sampler = loader._index_sampler


def behind_the_start(then: Callable[[], None]) -> Callable[[], None]:
    """What to call where a sampler begins. A new iterator of torch's begins its sampler before it starts workers, and once more behind
    that: `then` is called there."""
    calls = iter((lambda: None,))
    return lambda: next(calls, then)()
