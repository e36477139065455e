"""An iterator over a second DataLoader with which the loop goes on from step to step is told, and no other."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from mt_resilient.training.data.notices import Beside
from mt_resilient.training.data.worker_start import Started

STEPS = 8
Body = Callable[[int], Any]


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DataLoader, "_get_iterator", DataLoader._get_iterator)


def loader() -> Any:
    return DataLoader(TensorDataset(torch.arange(6.0)))


def cycled() -> Body:
    batches = itertools.chain.from_iterable(loader() for _ in itertools.count())
    return lambda step: next(batches) if step % 2 else None


def made_before_the_loop() -> Body:
    batches = iter(loader())
    return lambda step: next(batches, None)


def a_whole_pass() -> Body:
    held = loader()
    return lambda step: [*held]


def a_part_of_a_pass() -> Body:
    held = loader()
    return lambda step: next(iter(held))


def looked_at_once() -> Body:
    batches = iter(loader())
    first = next(batches)
    return lambda step: (first, batches)


def for_the_loop() -> Iterator[Any]:
    """What session.batches takes its batches from goes on from step to step."""
    yield from loader()


def said_of(make: Callable[[], Body], steps: int = STEPS, accumulated: int = 0) -> list[str]:
    """What is said of a loop that takes `accumulated` further batches of its own within a step."""
    said: list[str] = []
    beside = Beside(said.append)
    started = Started(beside.made)
    body, batches = make(), for_the_loop()
    beside.begins()
    for step in range(steps):
        next(batches, None)
        beside.gives()
        body(step)
        for _ in range(accumulated):
            next(batches)
        beside.gave()
    assert started.collect() == {"had": []}
    return said


@pytest.mark.parametrize(
    ("make", "told"),
    [(cycled, 1), (made_before_the_loop, 1), (a_whole_pass, 0), (a_part_of_a_pass, 0), (looked_at_once, 0)],
)
def test_only_an_iterator_that_goes_on_from_step_to_step_is_told(make: Callable[[], Body], told: int) -> None:
    said = said_of(make)
    assert len(said) == told
    assert all("continues one iterator from step to step" in each for each in said)


def test_an_iterator_that_was_made_before_the_session_is_told_at_the_first_start() -> None:
    held = DataLoader(TensorDataset(torch.arange(6.0)), num_workers=1, persistent_workers=True)
    batches, idle, ours = iter(loader()), iter(loader()), iter(held)
    for used, told in (([held], 1), (None, 0)):
        said: list[str] = []
        beside = Beside(said.append)
        beside.begins(used)
        for _ in range(3):
            beside.gives()
            next(batches)
            next(ours)
            beside.gave()
        assert len(said) == told
    del idle


def test_batches_that_a_step_accumulates_are_of_the_loops_own_iterator() -> None:
    assert said_of(lambda: id, steps=2, accumulated=1) == []


@pytest.mark.parametrize("batches", [iter([1, 2]), (number for number in (1, 2))])
def test_an_iterator_of_a_library_that_replaces_torchs_is_left_alone(batches: Iterator[int]) -> None:
    beside = Beside(pytest.fail)
    beside.made(batches)
    beside.begins()
    for _ in range(2):
        beside.gives()
        next(batches)
        beside.gave()
