"""Batches of all sorts of loaders, put back: in the process that has gone on meanwhile, and in one that has just built its loader.

Between two batches the training draws, too (dropout). What is compared is each batch and each of these draws, with an ordinary loop's.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from mt_resilient import Session
from mt_resilient.resilience.errors import UsageError
from mt_resilient.training.batches import OVER, Batches
from mt_resilient.training.randomness import Randomness

SAMPLES, EPOCHS = 14, 3


class Numbers(Dataset[torch.Tensor]):
    """draws: from which generators what is loaded depends; own: one of its own."""

    def __init__(self, draws: bool = False, own: Any = None) -> None:
        self.draws, self.own = draws, own

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = random.random() + float(np.random.random()) + float(torch.rand(())) if self.draws else 0.0
        own = self.own.random() if self.own else 0.0
        return torch.tensor([index, noise, own], dtype=torch.float64)


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, length: int = SAMPLES) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for index in range(first, self.length, step):
            yield torch.tensor([index, random.random()], dtype=torch.float64)


class Distributed(DataLoader[torch.Tensor]):
    """As people write it: a loader over the shard of a rank."""

    def __init__(self, **how: Any) -> None:
        dataset = Numbers(draws=True)
        super().__init__(dataset, sampler=DistributedSampler(dataset, num_replicas=2, rank=1), **how)


class Own:
    """A loader of one's own, with a state."""

    def __init__(self) -> None:
        self.at, self.epoch = 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        while self.at < 5:
            self.at += 1
            yield 100 * self.epoch + self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def noise() -> Iterator[torch.Tensor]:
    for _ in range(6):
        yield torch.rand(2)


SEVERAL = {"num_workers": 2, "batch_size": 2}
LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled by the rank's generator": lambda: DataLoader(Numbers(), batch_size=3, shuffle=True),
    "shuffled by a generator of its own": lambda: DataLoader(Numbers(), batch_size=3, shuffle=True, generator=seeded()),
    "that draws": lambda: DataLoader(Numbers(draws=True), batch_size=3, shuffle=True),
    "that has a generator": lambda: DataLoader(Numbers(own=np.random.default_rng(3)), batch_size=4, shuffle=True),
    "that has one of Python's": lambda: DataLoader(Numbers(own=random.Random(3)), batch_size=4),
    "without the last batch": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, drop_last=True),
    "in no batches": lambda: DataLoader(Numbers(draws=True), batch_size=None, shuffle=True),
    "with replacement": lambda: DataLoader(
        Numbers(), batch_size=3, sampler=RandomSampler(Numbers(), replacement=True, num_samples=40, generator=seeded())
    ),
    "weighted": lambda: DataLoader(Numbers(), batch_size=3, sampler=WeightedRandomSampler([1.0, 2.0, 3.0] * 4, 12)),
    "of a subset": lambda: DataLoader(Numbers(), batch_size=3, sampler=SubsetRandomSampler(range(2, 12))),
    "with a batch sampler": lambda: DataLoader(
        Numbers(draws=True), batch_sampler=BatchSampler(RandomSampler(Numbers()), 4, drop_last=False)
    ),
    "distributed": lambda: Distributed(batch_size=2),
    "a stream": lambda: DataLoader(Stream(), batch_size=3),
    "a list": lambda: [1, 2, 3, 4, 5],
    "a function that makes an iterator": lambda: noise,
    "with a state": Own,
    "by workers": lambda: DataLoader(Numbers(), shuffle=True, **SEVERAL),
    "by workers that draw": lambda: DataLoader(Numbers(draws=True), shuffle=True, **SEVERAL),
    "by workers that draw, kept": lambda: DataLoader(
        Numbers(draws=True), shuffle=True, persistent_workers=True, **SEVERAL
    ),
    "by workers that have a generator": lambda: DataLoader(
        Numbers(own=random.Random(3)), shuffle=True, generator=seeded(), **SEVERAL
    ),
    "distributed, by workers that are kept": lambda: Distributed(persistent_workers=True, pin_memory=True, **SEVERAL),
    "a stream, by workers": lambda: DataLoader(Stream(), **SEVERAL),
    "a stream, by workers that are kept": lambda: DataLoader(Stream(), persistent_workers=True, **SEVERAL),
}


stateful = pytest.importorskip("torchdata.stateful_dataloader")
LOADERS |= {
    "torchdata's": lambda: stateful.StatefulDataLoader(Numbers(draws=True), batch_size=3, shuffle=True),
    "torchdata's, distributed": lambda: stateful.StatefulDataLoader(
        Numbers(), batch_size=2, sampler=DistributedSampler(Numbers(), num_replicas=2, rank=1)
    ),
    "torchdata's, by workers": lambda: stateful.StatefulDataLoader(Numbers(draws=True), shuffle=True, **SEVERAL),
    "torchdata's, by workers that are kept": lambda: stateful.StatefulDataLoader(
        Numbers(draws=True), shuffle=True, persistent_workers=True, **SEVERAL
    ),
    "torchdata's, a stream": lambda: stateful.StatefulDataLoader(Stream(), batch_size=3),
    "torchdata's, a stream by workers": lambda: stateful.StatefulDataLoader(Stream(), **SEVERAL),
}


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def drawn() -> tuple[float, ...]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def seed(number: int = 1) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def ordinary(sort: str) -> list[Any]:
    """What a loop without us sees."""
    seed()
    loader = LOADERS[sort]()
    seen = []
    for epoch in range(EPOCHS):
        for part in (loader, getattr(loader, "sampler", None)):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        for batch in loader() if callable(loader) else loader:
            seen.append((plain(batch), drawn()))
    return seen


class Loop:
    """What a Session does with batches, and what it keeps after each step."""

    def __init__(self, sort: str, number: int = 1) -> None:
        seed(number)
        self.randomness = Randomness(())
        self.data = Batches(LOADERS[sort](), EPOCHS, 1, None)
        self.data.keep(self.randomness, 0, 1)
        self.kept: list[Any] = []

    def run(self, step: int, most: int = 10**9) -> list[Any]:
        seen: list[Any] = []
        while len(seen) < most:
            self.kept.append(copy.deepcopy((self.data.collect(), self.randomness.collect())))
            batch = self.data.take(step + len(seen))
            if batch is OVER:
                break
            seen.append((plain(batch), drawn()))
        return seen

    def go_back(self, kept: Any) -> None:
        data, rank = copy.deepcopy(kept)
        self.data.restore(data)
        self.data.put_back()
        self.randomness.restore(rank)


@pytest.mark.parametrize("sort", LOADERS)
@pytest.mark.filterwarnings("ignore")
def test_a_loader_is_put_back(sort: str) -> None:
    expected = ordinary(sort)
    undisturbed = Loop(sort)
    assert undisturbed.run(0) == expected
    epoch = len(expected) // EPOCHS
    at = [0, 1, epoch - 1, epoch, epoch + 1, 2 * epoch + 2, len(expected)]
    same = Loop(sort)
    same.run(0, 2 * epoch + 1)
    for step in at:
        same.go_back(undisturbed.kept[step])
        assert same.run(step, 4) == expected[step : step + 4], f"in place, at step {step}"
    for step in (3, epoch + 2, 2 * epoch):
        fresh = Loop(sort, number=2)  # what has been drawn meanwhile does not matter
        fresh.go_back(undisturbed.kept[step])
        assert fresh.run(step) == expected[step:], f"in a new process, at step {step}"
