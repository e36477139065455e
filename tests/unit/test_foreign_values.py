"""Attributes of modules whose values are of an installed package's types, of numpy's or torch's: restored bit for bit, or named once."""

from __future__ import annotations

import collections
import decimal
import enum
import itertools
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from .lives import Life, Made, comes_back


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


Point = collections.namedtuple("Point", "x y")


class Slotted:
    __slots__ = ("n", "rows")

    def __init__(self, n: int = 0) -> None:
        self.n, self.rows = n, [n]


class Closing:
    """It can't be copied: two of them would close one file."""

    def __del__(self) -> None:
        pass


LIBRARY = types.ModuleType("somebodys_library")
sys.modules[LIBRARY.__name__] = LIBRARY
for each in (Mode, Point, Slotted, Closing):
    each.__module__ = LIBRARY.__name__
    setattr(LIBRARY, each.__name__, each)


class Net(nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.layer, self.held = nn.Linear(1, 1), held


def to(make: Callable[[int], Any]) -> tuple[Callable[[], Any], Callable[[Any, int], Any]]:
    return lambda: make(0), lambda model, n: setattr(model, "held", make(n))


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any, int], Any]]] = {
    "Enum": to(lambda n: Mode.SLOW if n % 2 else Mode.FAST),
    "named tuple": to(lambda n: Point(n, [n])),
    "list in a named tuple": (lambda: Point(0, []), lambda model, n: model.held.y.append(n)),
    "object of slots": (lambda: Slotted(), lambda model, n: (setattr(model.held, "n", n), model.held.rows.append(n))),
    "late object of slots": (lambda: None, lambda model, n: setattr(model, "held", Slotted(n))),
    "longdouble": to(lambda n: np.longdouble(n) / 3),
    "datetime64": to(lambda n: np.datetime64("2020-01-01") + n),
    "dtype": to(lambda n: np.dtype(["f4", "i4", "i8", "u1"][n % 4])),
    "structured scalar": (lambda: np.zeros((), "i4,i4")[()], lambda model, n: model.held.__setitem__("f0", n)),
    "what torch.max returns": to(lambda n: torch.max(torch.full((2, 2), n / 3), 0)),
    "complex": to(lambda n: complex(-0.0 if n % 2 else 0.0)),
    "Decimal": to(lambda n: decimal.Decimal("1.0" + "0" * n)),
    "itertools.count": (itertools.count, lambda model, n: next(model.held)),
    "one count in two places": (
        lambda: [counter := itertools.count(), {"same": counter}],
        lambda model, n: next(model.held[0]) + next(model.held[1]["same"]),
    ),
    "SeedSequence": (lambda: np.random.SeedSequence(3), lambda model, n: model.held.spawn(1)),
    "seeds of a generator": (
        lambda: [generator := np.random.default_rng(3), generator.bit_generator.seed_seq],
        lambda model, n: model.held[1].spawn(1),
    ),
}


def looks(held: Any) -> str:
    if isinstance(held, Slotted):
        return repr((held.n, held.rows))
    if isinstance(held, list) and isinstance(held[0], np.random.Generator):
        return repr((held[0].bit_generator.seed_seq is held[1], held[1].n_children_spawned))
    return repr(held)


@pytest.mark.parametrize("what", HELD)
def test_is_restored_in_place_and_in_a_new_process(what: str, capfd: pytest.CaptureFixture[str]) -> None:
    make, change = HELD[what]

    def made() -> Made:
        model = Net(make())
        return {"model": model}, lambda n: change(model, n), lambda: looks(model.held)

    for steps in (2, 3):
        comes_back(made, steps, 1, changes=False)
    assert not capfd.readouterr().err


def test_an_object_that_no_snapshot_stores_is_named_once_when_it_is_exchanged(
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = Net(Closing())
    life = Life(model=model)
    life.snapshot()
    assert not capfd.readouterr().err
    model.held = Closing()
    for _ in range(2):
        life.snapshot()
    assert capfd.readouterr().err.count("model.held is not kept") == 1


def test_an_object_of_the_framework_is_not_named(capfd: pytest.CaptureFixture[str]) -> None:
    model = Net(None)
    life = Life(model=model)
    life.snapshot()
    model.held = torch.autograd.profiler.record_function("step")
    life.snapshot()
    assert not capfd.readouterr().err
