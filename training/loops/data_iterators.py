"""Data iterators that Megatron's own functions create again after a restore, or for a jump over data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import GEN_CREATED, getgeneratorlocals, getgeneratorstate
from types import GeneratorType
from typing import Any

from torch.utils.data import DataLoader


@contextmanager
def one_batch_before(holder: Any, back: dict[str, int]) -> Iterator[None]:
    """Let the counters in `holder` say, in this block, that so much less is done. Samplers refuse to start at their end, but the iterators
    for a validation after the last step are created together with them."""
    kept = {name: getattr(holder, name) for name in back if hasattr(holder, name)}
    for name, value in kept.items():
        setattr(holder, name, value - back[name])
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(holder, name, value)


def begun(iterators: Any) -> Any:
    """Return the iterators, with those of `--dataloader-type cyclic` begun if they continue in the middle of an epoch.

    The first batch of an epoch draws a seed from the CPU's generator. In an undisturbed run, that draw came before the restored state. So
    the caller restores the generators after this call."""
    if isinstance(iterators, list):
        return [begun(each) for each in iterators]
    if type(iterators).__name__ == "RerunDataIterator":
        iterators.iterable = begun(iterators.iterable)
        return iterators
    loader = _not_begun(iterators)
    return iterators if loader is None else _cycle(iter(loader), loader)


def _not_begun(iterator: Any) -> DataLoader[Any] | None:
    """Return the loader of Megatron's `cyclic_iter` if it continues within an epoch; otherwise None. A loader whose workers persist draws
    only once."""
    if not isinstance(iterator, GeneratorType) or getgeneratorstate(iterator) != GEN_CREATED:
        return None
    loader = next((each for each in getgeneratorlocals(iterator).values() if isinstance(each, DataLoader)), None)
    sampler: Any = getattr(loader, "batch_sampler", None)
    if loader is None or not hasattr(sampler, "last_batch_size"):
        return None
    epoch, consumed = sampler.total_samples - sampler.last_batch_size, sampler.consumed_samples
    return loader if consumed and (consumed % epoch or loader.persistent_workers) else None


def _cycle(epoch: Iterator[Any], loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from epoch
        epoch = iter(loader)
