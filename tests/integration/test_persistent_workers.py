"""DataLoaders with workers that stay, which the loop's body goes through: those of an evaluation, and that of `session.batches` itself.

A start of workers draws a seed, and a further pass draws none. What is compared is each batch, and what the training draws.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from mt_resilient.training.data.batches import OVER, Batches
from mt_resilient.training.data.worker_start import Started
from mt_resilient.training.state.rng import Randomness

STEPS = 4
"""Of an epoch."""


class Noisy(Dataset[float]):
    def __init__(self, length: int) -> None:
        self.length, self.draws = length, True

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> float:
        return index + float(torch.rand(())) * self.draws


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DataLoader, "_get_iterator", DataLoader._get_iterator)


def loader(length: int, **how: Any) -> Any:
    return DataLoader(Noisy(length), batch_size=2, num_workers=1, persistent_workers=True, **how)


def seen(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


def sizes(batches: Any) -> int:
    """Their noise is not compared: it does not come back for loaders that session.batches does not know."""
    return len([*batches])


def alike(train: Any) -> Callable[[int], Any]:
    """Two loaders that are alike. The second begins later."""
    one, other = loader(4), loader(4)
    return lambda epoch: [sizes(each) for each in (one, other)[: 1 + epoch // 2]]


def anew(train: Any) -> Callable[[int], Any]:
    """A loader that each epoch makes anew, and holds until the next one does."""
    held: list[Any] = []

    def evaluate(epoch: int) -> int:
        held[:] = [loader(4)]
        return sizes(held[0])

    return evaluate


def own(train: Any) -> Callable[[int], Any]:
    return lambda epoch: seen(train)


def before_the_loop(train: Any) -> Callable[[int], Any]:
    """The script has a look at a batch. The generators of these workers are not known, so they do not draw."""
    train.dataset.draws = False
    next(iter(train))
    return lambda epoch: None


def evaluated(train: Any) -> Callable[[int], Any]:
    evaluation = loader(4)
    return lambda epoch: sizes(evaluation)


class Wrapped:
    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self.iterator._reset(loader, first_iter)

    def __next__(self) -> torch.Tensor:
        return next(self.iterator) + 100  # type: ignore[no-any-return]


class Wrapping(DataLoader[float]):
    """As PyG's NodeLoader: its iterator changes each batch."""

    def _get_iterator(self) -> Any:
        return Wrapped(super()._get_iterator())


def wrapped(train: Any) -> Callable[[int], Any]:
    evaluation = Wrapping(Noisy(4), batch_size=2, num_workers=1, persistent_workers=True)
    evaluation.dataset.draws = False  # type: ignore[attr-defined]
    return lambda epoch: seen(evaluation)


def drawn() -> float:
    return float(torch.rand(()))


class Life:
    def __init__(self, script: Any, number: int = 1) -> None:
        torch.manual_seed(number)
        self.started, train = Started(lambda _: None), loader(8, shuffle=True)
        self.body = script(train)
        self.data = Batches(train, None, 1, None)
        self.randomness = Randomness(())
        self.data.keep(self.randomness, 0)
        self.started.apart = self.data.loaders
        self.kept: list[Any] = []

    def run(self, step: int, most: int) -> Iterator[Any]:
        for each in range(step, step + most):
            sources = self.data.place(), self.data.collect(), self.started.collect(), self.randomness.collect()
            self.kept.append(copy.deepcopy(sources))
            batch = self.data.take(each).tolist()
            yield batch, drawn(), self.body(each // STEPS) if self.data.ends(each + 1) else None, drawn()

    def go_back(self, kept: Any) -> None:
        place, data, started, randomness = copy.deepcopy(kept)
        self.data.go_to(place)
        self.data.restore(data)
        self.started.restore(started)
        self.data.put_back()
        self.randomness.restore(randomness)


def ordinary(script: Any, steps: int) -> Iterator[Any]:
    torch.manual_seed(1)
    train = loader(8, shuffle=True)
    body = script(train)
    for step in range(steps):
        if step % STEPS == 0:
            batches = iter(train)
        batch = next(batches).tolist()
        yield batch, drawn(), body(step // STEPS) if step % STEPS == STEPS - 1 else None, drawn()


@pytest.mark.parametrize(
    "script",
    [
        evaluated,
        wrapped,
        *(pytest.param(each, marks=pytest.mark.variant) for each in (own, alike, anew, before_the_loop)),
    ],
)
def test_workers_that_stay_draw_their_seed_once_whatever_goes_through_them(script: Any) -> None:
    expected = [*ordinary(script, 4 * STEPS)]
    life = Life(script)
    assert [*life.run(0, 4 * STEPS)] == expected
    kept = life.kept
    for step in (1, STEPS, 2 * STEPS + 2):
        life.go_back(kept[step])
        assert [*life.run(step, STEPS + 1)] == expected[step : step + STEPS + 1], f"in place, at step {step}"
        fresh = Life(script, number=2)
        fresh.go_back(kept[step])
        again = fresh.run(step, 4 * STEPS - step)
        assert [next(again), next(again)] == expected[step : step + 2], f"in a new process, at step {step}"
        later = Life(script, number=3)
        later.go_back(fresh.kept[-1])
        assert [*later.run(step + 1, STEPS)] == expected[step + 1 : step + 1 + STEPS], "and once more"


def test_a_pass_of_the_script_s_own_in_the_last_step_of_an_epoch_is_behind_it() -> None:
    """Workers that stay have one iterator for all who go through the loader."""
    train = loader(8, shuffle=True)
    data = Batches(train, 3, 1, None)
    steps = 0
    while steps < 20 and data.take(steps) is not OVER:
        steps += 1
        if data.ends(steps):
            next(iter(train))
    assert steps == 3 * STEPS
