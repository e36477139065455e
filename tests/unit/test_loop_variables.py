"""What a script's own variables carry from step to step: generators are kept, all else is named."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mt_resilient.training.boundary import loop_variables
from mt_resilient.training.boundary.loop_variables import Generators, moved_on

DRAWN = random.Random(8)
NUMBER = 0


@pytest.fixture(autouse=True)
def script(monkeypatch: pytest.MonkeyPatch) -> None:
    """This file is the script."""
    monkeypatch.setattr(loop_variables, "installed", lambda file: file != __file__)
    monkeypatch.setattr(loop_variables, "_PYTHONS", ("/nowhere",))


def asked(found: dict[str, Any], generators: Generators | None = None) -> Iterator[int]:
    """As a Session's steps."""
    found["names"] = moved_on(sys._getframe().f_back)
    if generators is not None:
        generators.look(sys._getframe().f_back)
    yield from range(3)


def counts(found: dict[str, Any]) -> None:
    count, best = 0, None
    for step in asked(found):
        count += 1 + step
        if best is None or count < best:
            best = count


def averages(found: dict[str, Any]) -> None:
    hidden, mean = torch.zeros(2), 0.0
    for step in asked(found):
        hidden = torch.tanh(hidden + step)
        mean = 0.9 * mean + 0.1 * float(hidden.sum())


def of_the_module(found: dict[str, Any]) -> None:
    global NUMBER
    for _ in asked(found):
        NUMBER += 1


def a_batch_ahead(found: dict[str, Any]) -> None:
    batch = torch.ones(2)
    for _ in asked(found):
        loss = batch.sum()
        batch = torch.ones(2) * loss


def enumerated(found: dict[str, Any]) -> None:
    total = 0.0
    for at, step in enumerate(asked(found)):
        total += at * step


def nothing(found: dict[str, Any]) -> None:
    losses, began_s = [], time.perf_counter()
    for step in asked(found):
        loss = step * 2
        loss = loss + 1
        losses.append(loss)
        took = [each for each in losses if each]
        now_s = time.perf_counter()
        spent_s, began_s = now_s - began_s, now_s
        del took, spent_s


def an_iterator(found: dict[str, Any]) -> None:
    rest = iter(range(9))
    for _ in asked(found):
        next(rest)
        rest = iter(range(9))


def no_loop(found: dict[str, Any]) -> None:
    count = 0
    steps = asked(found)
    while next(steps, None) is not None:
        count += 1


@pytest.mark.parametrize(
    ("loop", "names"),
    [
        (counts, ["count", "best"]),
        (averages, ["hidden", "mean"]),
        (of_the_module, ["NUMBER"]),
        (a_batch_ahead, ["batch"]),
        (enumerated, ["total"]),
        (nothing, []),
        (an_iterator, []),
        (no_loop, []),
    ],
)
def test_what_a_loop_goes_on_with_is_named(loop: Any, names: list[str]) -> None:
    found: dict[str, Any] = {}
    loop(found)
    assert found["names"] == names


def test_generators_in_variables_come_back() -> None:
    numpys, torchs = np.random.default_rng(1), torch.Generator().manual_seed(2)
    inner = SimpleNamespace(own=random.Random(4))

    def draw() -> list[float]:
        drawn = [numpys.random(), float(torch.rand(1, generator=torchs)), DRAWN.random()]
        return [*drawn, inner.own.random()]

    generators = Generators()
    for _ in asked({}, generators):
        break
    draw()
    kept = generators.collect()
    expected = draw()
    generators.restore(kept)
    assert draw() != expected  # the data may draw on its way back
    generators.put_back()
    assert draw() == expected


def test_the_ranks_own_generators_and_those_of_other_classes_are_left_alone() -> None:
    class Mine(random.Random):
        pass

    everybodys, mine, system = torch.default_generator, Mine(3), random.SystemRandom()
    generators = Generators()
    for _ in asked({}, generators):
        break
    before = mine.getstate()
    generators.restore(generators.collect())
    mine.random()
    torch.rand(1)
    drawn = everybodys.get_state()
    generators.put_back()
    assert mine.getstate() != before
    assert torch.equal(everybodys.get_state(), drawn)
    assert 0 <= system.random() < 1


def test_nothing_is_kept_alive_by_the_look() -> None:
    import weakref

    held = torch.ones(3)
    gone = weakref.ref(held)
    for _ in asked({}, Generators()):
        break
    del held
    assert gone() is None
