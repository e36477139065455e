"""Data iterators that are created again after a restore: which random numbers their first batch draws."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from mt_resilient.training.loops.data_iterators import begun


class Sampler:
    """As MegatronPretrainingRandomSampler: epochs of 4 batches of 2 samples, and a rest of one sample."""

    total_samples, last_batch_size = 9, 1

    def __init__(self, consumed_samples: int = 0) -> None:
        self.consumed_samples = consumed_samples

    def __iter__(self) -> Iterator[list[int]]:
        for at in range(self.consumed_samples % 8, 8, 2):
            self.consumed_samples += 2
            yield [at, at + 1]


class RerunDataIterator:
    """As Megatron's."""

    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable

    def __next__(self) -> Any:
        return next(self.iterable)


def cyclic_iter(iter: Any) -> Iterator[Any]:
    while True:
        yield from iter


def cyclic(consumed: int, workers: int = 0) -> RerunDataIterator:
    persists = {"num_workers": workers, "persistent_workers": workers > 0}
    return RerunDataIterator(iter(cyclic_iter(DataLoader([*range(9)], batch_sampler=Sampler(consumed), **persists))))


def steps(iterator: Any, number: int) -> list[tuple[list[int], float]]:
    """Each step takes a batch and a random number of the CPU's generator."""
    return [(next(iterator).tolist(), torch.rand(()).item()) for _ in range(number)]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("at", [0, 1, 3, 4, 5, 8, 9])
def test_a_cyclic_iterator_continues_with_the_random_numbers_of_an_undisturbed_run(at: int, workers: int) -> None:
    torch.manual_seed(7)
    iterator = cyclic(0, workers)
    steps(iterator, at)
    kept = torch.get_rng_state()
    expected = steps(iterator, 7)
    (again,) = begun([cyclic(2 * at, workers)])
    torch.set_rng_state(kept)
    assert steps(again, 7) == expected


def test_other_iterators_stay_as_they_are() -> None:
    plain = iter(range(3))
    generator = cyclic_iter(DataLoader([*range(4)], batch_size=2))
    assert begun([None, plain, generator]) == [None, plain, generator]
    assert next(generator).tolist() == [0, 1]
