"""What workers that stay from epoch to epoch were started with.

Such workers have the dataset and the collate function as these were where the workers were started. What the loop changes in them later
(`set_epoch`, `dataset.strength = …`) does not reach the workers. So workers in their place are started from the same values:

the first epoch: values ─▶ kept ─▶ workers          a recovery: kept ─▶ values ─▶ workers; then the values of the restored step
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..state.tensors.in_place import Nested
from .loader_state import Own

_SENT = ("dataset", "collate_fn", "worker_init_fn")
"""Of a loader: what its workers get."""


class AtStart:
    def __init__(self, loader: Any) -> None:
        stays = getattr(loader, "persistent_workers", False) is True
        self._own = Own(**{name: getattr(loader, name) for name in _SENT if hasattr(loader, name)} if stays else {})
        self.kept: Nested | None = None
        """None: no workers were started."""

    def keep(self) -> None:
        """To be called right before workers are started."""
        self.kept = self._own.collect()

    def put_back(self) -> None:
        """All that workers get is what it was where those of `kept` were started."""
        if self.kept is not None:
            self._own.restore(self.kept)


def behind_the_start(then: Callable[[], None]) -> Callable[[], None]:
    """What to call where a sampler begins. A new iterator of torch's begins its sampler before it starts workers, and once more behind
    that: `then` is called there."""
    calls = iter((lambda: None,))
    return lambda: next(calls, then)()
