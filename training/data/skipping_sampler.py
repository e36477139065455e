"""A data loader's sampler that can start at a later batch of the epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.utils.data import DistributedSampler, sampler

from .checksums import Checksums, of_indexes

Watched = Callable[[int, Callable[[], Any]], Any]
_DRAW_AT_THEIR_START = (
    sampler.SequentialSampler,
    sampler.RandomSampler,
    sampler.SubsetRandomSampler,
    sampler.WeightedRandomSampler,
    sampler.BatchSampler,
    DistributedSampler,
)
"""Samplers that draw for the whole epoch at its start, from the rank's generators. The order of such a sampler does not depend on numbers
that the training draws later."""
_DRAW_THEIR_ORDER = (sampler.RandomSampler, sampler.SubsetRandomSampler, sampler.WeightedRandomSampler)
_OVER = object()


def draws_at_its_start(found: Any) -> bool:
    kind: Any = type(found)
    return kind in _DRAW_AT_THEIR_START


def draws_its_order(found: Any) -> bool:
    """Return whether the order of an epoch comes from a random generator. (A DistributedSampler computes it from the epoch's number.)"""
    return isinstance(found, _DRAW_THEIR_ORDER)


class Behind:
    """Wraps a loader's sampler. At the next iteration, it calls `before` and then skips the first `skip` batches."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._whole = sampler
        self.skip = 0
        self.before: Callable[[], None] | None = None
        self.watched: Watched | None = None
        self._begun: Iterator[Any] = iter(())
        self._number = 0
        """The number of batches that the sampler has given."""
        self.checksums = Checksums()
        """Checksums of the batches that the sampler has given."""
        self._is_ours = False
        self.taken_over = False
        """Whether the script, not the loop, was the last to start the sampler."""

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Within this block, the loop starts the sampler, not the script."""
        self._is_ours, self.taken_over = True, False
        yield
        self._is_ours = False

    def __iter__(self) -> Iterator[Any]:
        """Start the sampler. A loader may call this twice before it takes the first batch."""
        if not self._is_ours:
            self.taken_over = True
            return iter(self._whole)
        if self.before is not None:
            self.before()
        self._begun, self._number, self.checksums = iter(self._whole), 0, Checksums()
        return self._taken()

    def _taken(self) -> Iterator[Any]:
        self.leave_out()
        while (batch := self._next()) is not _OVER:
            yield batch

    def _next(self) -> Any:
        number, self._number = self._number, self._number + 1
        take = partial(next, self._begun, _OVER)
        batch = take() if self.watched is None else self.watched(number, take)
        if batch is not _OVER:
            self.checksums.add(of_indexes(batch))
        return batch

    def __len__(self) -> int:
        return len(self._whole)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped sampler, such as `set_epoch`, its inner sampler, or `batch_size`."""
        return getattr(self._whole, name)

    def leave_out(self) -> None:
        """Skip the batches now, if that has not happened yet: some samplers draw with their first batch."""
        skip, self.skip, self.before = self.skip, 0, None
        for _ in range(skip):
            self._next()
