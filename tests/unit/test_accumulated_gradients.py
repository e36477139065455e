"""Gradients between two steps of an optimizer belong to the state: a loop that goes on from any boundary ends with the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from mt_resilient.training.state.modules.module_source import Modules
from mt_resilient.training.state.optimizers.accumulated_gradients import Accumulation
from mt_resilient.training.state.optimizers.optimizers import Optimizers

STEPS = 12
Step = Callable[[int], None]
Training = tuple[nn.Module, list[torch.optim.Optimizer], Step]
Loop = Callable[[], Training]


def backward(model: nn.Module, step: int) -> None:
    model(torch.randn(3, 2, generator=torch.Generator().manual_seed(step))).square().mean().backward()


def adding(every: int, to_none: bool, first: bool) -> Loop:
    """Of three layers the second is used in every fifth step only; first: gradients go before a pass, else behind the optimizer's step."""

    def loop() -> Training:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=0.1)

        def step(number: int) -> None:
            if first and number % every == 0:
                optimizer.zero_grad(to_none)
            backward(model if number % 5 == 1 else nn.Sequential(model[0], model[2]), number)
            if (number + 1) % every == 0:
                optimizer.step()
                if not first:
                    optimizer.zero_grad(to_none)

        return model, [optimizer], step

    return loop


def two_optimizers() -> Training:
    """One steps each time, the other each third time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    often, seldom = (torch.optim.Adam(layer.parameters(), 0.1) for layer in model)

    def step(number: int) -> None:
        backward(model, number)
        often.step()
        often.zero_grad()
        if number % 3 == 2:
            seldom.step()
            seldom.zero_grad()

    return model, [often, seldom], step


def parameter_of_nobody() -> Training:
    torch.manual_seed(0)
    model, scale = nn.Linear(2, 1), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([*model.parameters(), scale], 0.1)

    def step(number: int) -> None:
        (model(torch.full((1, 2), float(number))) * scale).sum().backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()

    return model, [optimizer], step


def by_hand() -> Training:
    """No optimizer: who takes the gradients is not known."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)

    def step(number: int) -> None:
        backward(model, number)
        for parameter in model.parameters() if number % 3 == 2 else ():
            assert parameter.grad is not None
            parameter.data.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None

    return model, [], step


class Life:
    """A loop in a process of its own."""

    def __init__(self, loop: Loop) -> None:
        self.model, optimizers, self.step = loop()
        self.said: list[str] = []
        self.sources = [Modules([self.model]), *map(Optimizers, optimizers)]
        for optimizer in self.sources[1:]:
            optimizer.parameters = [lambda: dict(self.model.named_parameters())]  # type: ignore[union-attr]
        self.gradients = Accumulation(self.sources[:1], self.sources[1:], [], self.said.append)  # type: ignore[arg-type]
        self.kept: list[Any] = []

    def run(self, begin: int, end: int) -> None:
        for number in range(begin, end):
            self.step(number)
            self.gradients.crossed()
            collected = [source.collect() for source in self.sources]
            self.kept.append(copy.deepcopy([*collected, self.gradients.collect()]))

    def go_back(self, kept: Any) -> None:
        for source, each in zip(self.sources, copy.deepcopy(kept), strict=False):
            source.collect()
            source.restore(each)
        self.gradients.restore(copy.deepcopy(kept[-1]))

    def end(self) -> list[torch.Tensor]:
        self.gradients._hook.remove()
        return [parameter.detach().clone() for parameter in self.model.parameters()]


@pytest.fixture
def lives() -> Iterator[Callable[[Loop], Life]]:
    begun: list[Life] = []

    def begin(loop: Loop) -> Life:
        begun.append(Life(loop))
        return begun[-1]

    yield begin
    for life in begun:
        life.gradients._hook.remove()


def sparse() -> Training:
    torch.manual_seed(0)
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), 0.1)

    def step(number: int) -> None:
        table(torch.tensor([number % 4])).square().sum().backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()

    return table, [optimizer], step


def steps_first(every: int) -> Loop:
    """The optimizer takes what the steps before have left."""

    def loop() -> Training:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters(), 0.1)

        def step(number: int) -> None:
            if number and number % every == 0:
                optimizer.step()
                optimizer.zero_grad()
            backward(model, number)

        return model, [optimizer], step

    return loop


def decaying(factor: float) -> Loop:
    """Gradients are never dropped."""

    def loop() -> Training:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)

        def step(number: int) -> None:
            for parameter in model.parameters() if number else ():
                assert parameter.grad is not None
                parameter.grad.mul_(factor)
            backward(model, number)
            optimizer.step()

        return model, [optimizer], step

    return loop


def leaving() -> Training:
    """As of a GAN: the second pass leaves gradients in the first part."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    first, second = (torch.optim.Adam(layer.parameters(), 0.1) for layer in model)

    def step(number: int) -> None:
        for optimizer in (first, second) if number % 3 == 0 else (first,):
            backward(model, number)
            optimizer.step()
            optimizer.zero_grad()

    return model, [first, second], step


def flat() -> Training:
    """Gradients are views of one buffer."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    buffer = torch.zeros(3)
    model.weight.grad, model.bias.grad = buffer[:2].view(1, 2), buffer[2:]

    def step(number: int) -> None:
        backward(model, number)
        if number % 2:
            buffer.div_(2)
            optimizer.step()
            buffer.zero_()

    return model, [optimizer], step


LOOPS: dict[str, Loop] = {
    f"every {every}, {'None' if to_none else 'zeros'}, {'before' if first else 'behind'}": adding(every, to_none, first)
    for every in (1, 2, 4)
    for to_none in (True, False)
    for first in (True, False)
} | {
    "two optimizers": two_optimizers,
    "a parameter of no module": parameter_of_nobody,
    "by hand": by_hand,
    "sparse": sparse,
    "steps first": steps_first(1),
    "steps first, each third time": steps_first(3),
    "for ever": decaying(1.0),
    "decaying": decaying(0.5),
    "leaving": leaving,
    "flat": flat,
}


@pytest.mark.parametrize("loop", [pytest.param(loop, id=name) for name, loop in LOOPS.items()])
def test_every_boundary_is_one_to_go_on_from(loop: Loop, lives: Callable[[Loop], Life]) -> None:
    """In place, from two steps behind it, and in a new process."""
    life = lives(loop)
    life.run(0, STEPS)
    expected = life.end()
    for step in range(1, STEPS - 2):
        for begun in (0, step + 2):
            again = lives(loop)
            again.run(0, begun)
            again.go_back(life.kept[step - 1])
            again.run(step, STEPS)
            assert all(map(torch.equal, again.end(), expected)), step


def test_an_ordinary_loop_keeps_no_gradient_once_it_is_known(lives: Callable[[Loop], Life]) -> None:
    for first in (True, False):
        life = lives(adding(1, to_none=True, first=first))
        life.run(0, STEPS)
        assert not any(kept[-1].get("sums") for kept in life.kept[2:])


@pytest.mark.parametrize("where", ["nothing", "parameter", "buffer", "gradient", "moment"])
def test_nan_anywhere_in_the_state_does_harm(where: str) -> None:
    model = nn.Linear(2, 1)
    model.register_buffer("mean", torch.zeros(1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    accumulation = Accumulation([Modules([model])], [Optimizers(optimizer)], [], print)
    backward(model, 0)
    optimizer.step()
    with torch.no_grad():
        spoiled = {
            "nothing": torch.zeros(1),
            "parameter": model.bias,
            "buffer": model.mean,
            "gradient": model.bias.grad,
            "moment": optimizer.state[model.bias]["exp_avg_sq"],
        }[where]
        assert spoiled is not None
        spoiled.fill_(float("nan"))
    finite = accumulation.finite()
    accumulation.release()
    assert finite is (where == "nothing")
