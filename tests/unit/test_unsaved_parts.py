"""What holds a thing that no snapshot holds (a lambda, a lock) is kept beside it, in attributes of modules. What goes on with each use and
cannot be kept is named."""

from __future__ import annotations

import functools
import itertools
import logging
import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mt_resilient.training.warm.side_effects import is_scripts

from .lives import Life


class AttrDict(dict):  # type: ignore[type-arg]
    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.__dict__ = self


def counts(held: Any) -> float:
    held["n"] += 1
    return float(held["n"])


def anneals(held: Any) -> float:
    held["t"] *= 0.9
    held["seen"].append(held["t"])
    return float(held["act"](held["t"]) + len(held["seen"]))


def turns(held: Any) -> float:
    """Two functions without names take turns."""
    held["f"].append(held["f"].popleft())
    return float(held["f"][0](2.0))


def follows(held: Any) -> float:
    for teacher in (held["pairs"][0][1], held["deep"]["a"][0]):
        with torch.no_grad():
            teacher.weight.mul_(0.9)
    return float(held["pairs"][0][1].weight.sum() + held["deep"]["a"][0].weight.sum())


def averages(held: Any) -> float:
    held["ema"] = held["ema"] * 0.9 + 0.1
    return float(held["ema"])


def draws(held: Any) -> float:
    return float(held[0]() + held[1]() + held[2](1.0))


def sets(held: Any) -> float:
    held.lr *= 0.5
    held["n"] += 1
    return float(held.lr + held["n"])


def teachers() -> dict[str, Any]:
    torch.manual_seed(1)
    return {"pairs": [("l", nn.Linear(2, 2))], "deep": {"a": [nn.Linear(2, 2)]}}


KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "a defaultdict of a lambda": (lambda: defaultdict(lambda: 0.0), counts),
    "a mapping with a lambda": (lambda: {"t": 1.0, "act": lambda x: x + 1, "seen": []}, anneals),
    "functions without names that take turns": (lambda: {"f": deque([lambda x: x, lambda x: -x])}, turns),
    "a partial of a lambda": (lambda: {"t": 1.0, "act": functools.partial(lambda k, x: k * x, 2), "seen": []}, anneals),
    "a mapping with a lock and a logger": (
        lambda: {"ema": 0.0, "lock": threading.Lock(), "log": logging.getLogger("x"), "t": threading.Thread()},
        averages,
    ),
    "teachers deep in containers": (teachers, follows),
    "methods of generators": (
        lambda: [random.Random(3).random, np.random.default_rng(5).standard_normal, np.random.RandomState(2).normal],
        draws,
    ),
    "a dict that is its own attributes": (lambda: AttrDict(lr=1.0, n=0, sub=AttrDict(a=1)), sets),
}


class Net(nn.Module):
    def __init__(self, made: Callable[[], Any], moved: Callable[[Any], float]) -> None:
        super().__init__()
        self.layer, self.held, self.moved = nn.Linear(2, 2), made(), moved

    def step(self) -> float:
        return self.moved(self.held)


@pytest.mark.parametrize("kind", KEPT)
def test_what_is_beside_it_comes_back(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    one, other = Net(*KEPT[kind]), Net(*KEPT[kind])
    life = Life(model=one)
    life.snapshot()
    for _ in range(3):
        one.step()
    kept, objects = life.snapshot(), life.objects()
    expected = [one.step() for _ in range(3)]
    life.restore(kept, objects)
    assert [one.step() for _ in range(3)] == expected, "a rewind in place"
    later = Life(model=other)
    later.restore(kept)
    assert [other.step() for _ in range(3)] == expected, "a restart"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "made",
    [
        lambda: itertools.cycle([1, 2]),
        lambda: (each for each in range(9)),
        lambda: {"it": iter([1, 2])},
        lambda: np.ma.masked_array(np.zeros(3)),
        lambda: np.array([None, 1.5], dtype=object),
    ],
)
def test_what_moves_on_and_cannot_be_kept_is_named(made: Callable[[], Any], capfd: pytest.CaptureFixture[str]) -> None:
    life = Life(model=Net(made, float))
    life.snapshot()
    life.snapshot()
    assert capfd.readouterr().err.count("model.held is not kept, and a recovery continues with another value") == 1


class Cloud:
    """Points that are split on the way, as in Gaussian splatting: parameters of no module."""

    def __init__(self) -> None:
        self.points = nn.Parameter(torch.arange(6.0).reshape(3, 2))
        self.optimizer = torch.optim.Adam([{"params": [self.points], "name": "points"}], 0.1)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.points.square().sum().backward()
        self.optimizer.step()

    def split(self) -> None:
        group = self.optimizer.param_groups[0]
        state = self.optimizer.state.pop(self.points)
        self.points = nn.Parameter(torch.cat((self.points.detach(), self.points.detach()[:1])))
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.cat((state[name], torch.zeros(1, 2)))
        group["params"] = [self.points]
        self.optimizer.state[self.points] = state


def test_parameters_of_no_module_that_grow_are_there_after_a_restart() -> None:
    one, other = Cloud(), Cloud()
    life = Life(cloud=one)
    life.snapshot()
    for _ in range(2):
        one.step()
        one.split()
    kept = life.snapshot()
    assert life.bound == ""
    one.step()
    later = Life(cloud=other)
    later.restore(kept)
    other.step()
    assert torch.equal(one.points, other.points)
    again = later.snapshot()
    other.split()
    third = Cloud()
    life = Life(cloud=third)
    life.restore(again)
    assert third.points.shape == (5, 2)


class ByGroup(torch.optim.SGD):
    """A table by group, which no key but its id serves; and optimizers deep in attributes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__([{"params": [each]} for each in model.parameters()], 0.1)
        self.norms: dict[int, float] = {}
        self.parts = [("a", torch.optim.Adam(model.parameters(), 0.01))]

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            self.norms[id(group)] = self.norms.get(id(group), 0.0) + 1
            group["params"][0].grad.mul_(1 + 1 / self.norms[id(group)])
        super().step()
        self.parts[0][1].step()


def test_an_optimizer_s_table_by_group_and_optimizers_within_it() -> None:
    lives = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        optimizer = ByGroup(model)
        lives.append((Life(model=model, optimizer=optimizer), model, optimizer))

    def step(model: nn.Module, optimizer: ByGroup) -> None:
        optimizer.zero_grad()
        model(torch.ones(2)).sum().backward()
        optimizer.step()

    (life, *one), (later, *other) = lives
    step(*one)
    kept = life.snapshot()
    step(*one)
    later.restore(kept)
    step(*other)
    assert torch.equal(one[0].weight, other[0].weight)
    assert [*other[1].norms.values()] == [2.0, 2.0]


class Inspector:
    """As PyTorch Geometric's: an installed class, of which nobody knows how to save all."""

    def __init__(self) -> None:
        self.signature, self.calls = {"x": object()}, 0


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inspector = Inspector()


def test_an_object_of_the_module_s_own_package_is_named_once_it_has_changed(capfd: pytest.CaptureFixture[str]) -> None:
    for kind in (Inspector, Convolution):
        assert not is_scripts(kind.__module__)
    model = Convolution()
    life = Life(model=model)
    life.snapshot()
    assert not capfd.readouterr().err
    model.inspector.calls += 1
    life.snapshot()
    assert "model.inspector is not kept" in capfd.readouterr().err
