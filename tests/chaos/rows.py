"""States that nobody draws (`drawn.py`): each is a training of a few lines that keeps something in a place of its own, and uses it.

A row gives what its Session gets, and what a step does. What it keeps has to show in its parameters, or in what the Session gets.
"""

from __future__ import annotations

import collections
import enum
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

Step = Callable[[int], Any]
Row = tuple[dict[str, Any], Step]


def batch(number: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number))


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def train(model: nn.Module, *optimizers: Any) -> Step:
    def step(number: int) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(batch(number, 8, 4)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    return step


class Busy(nn.Linear):
    """Keeps in plain attributes what torch knows nothing of."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls, self.seen, self.hidden = 0, [0.0], None
        self.mean, self.counted = torch.zeros(4), collections.Counter[int]()
        self.noise, self.dice, self.draw = torch.Generator().manual_seed(1), random.Random(1), np.random.default_rng(1)
        self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(4)
        self.optimizer = torch.optim.Adam(self.parameters(), 0.05)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.counted[self.calls % 3] += 1
        made = self.norm(self.drop(super().forward(inputs))) / (1 + self.calls + self.counted[0])
        self.seen.append(float(made.detach().mean()) + self.dice.random() + self.draw.random())
        self.mean = 0.9 * self.mean + 0.1 * made.detach().mean(0)
        self.hidden = self.mean if self.hidden is None else self.hidden + self.mean
        self.norm.momentum *= 0.9
        if self.calls == 4:
            self.drop.p = 0.1
        return made - self.mean - self.hidden + sum(self.seen) + torch.rand(4, generator=self.noise)


def attributes() -> Row:
    model = Busy()

    def step(number: int) -> None:
        train(model, model.optimizer)(number)
        model.schedule.step()

    return {"model": model}, step


def parameter_of_nobody() -> Row:
    model, scale = network(), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([*model.parameters(), scale], 0.05)

    def step(number: int) -> None:
        optimizer.zero_grad()
        (model(batch(number, 8, 4)).square().mean() * scale.exp() - scale.sum()).backward()
        optimizer.step()

    return {"model": model, "optimizer": optimizer}, step


def groups_change() -> Row:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    optimizer = torch.optim.Adam([{"params": [*m.parameters()], "lr": 0.1 / (n + 1)} for n, m in enumerate(model)])

    def step(number: int) -> None:
        train(model, optimizer)(number)
        groups = optimizer.param_groups
        if number == 2:
            groups[0]["params"][0], groups[1]["params"][0] = groups[1]["params"][0], groups[0]["params"][0]
        if number == 7:
            for parameter in groups.pop(2)["params"]:
                del optimizer.state[parameter]
            groups[0]["params"].reverse()

    return {"model": model, "optimizer": optimizer}, step


def expanded() -> Row:
    model = network()
    whole = torch.zeros(3)
    model.register_buffer("wide", whole[:1].expand(4))
    model.register_buffer("learnt", torch.zeros(4))

    def step(number: int) -> None:
        whole.add_(1)
        if number == 3:
            model.learnt.requires_grad_()
        (model(batch(number, 8, 4)) + model.learnt + model.wide).square().mean().backward()
        with torch.no_grad():
            for each in (*model.parameters(), model.learnt):
                if each.grad is not None:
                    each -= 0.05 * each.grad
                    each.grad = None

    return {"model": model, "whole": [whole]}, step


class Norm(enum.Enum):
    L1 = 1
    MAX = 2


class Queued(torch.optim.Optimizer):
    """A queue of gradients, and tables by numbers that are no integers."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                queue = state.setdefault("queue", collections.deque(maxlen=3))
                table = state.setdefault("table", {0.0: torch.zeros_like(p), 0.9: torch.zeros_like(p)})
                queue.append(p.grad.clone())
                for beta, moment in table.items():
                    moment.mul_(beta).add_(queue[0])
                scale = p.grad.abs().mean() if group["norm"] is Norm.L1 else p.grad.abs().max()
                p.data.sub_(sum(table.values()) * scale, alpha=0.05)
            group["norm"] = Norm.MAX

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"norm": Norm.L1})


def queued() -> Row:
    model = network()
    optimizer = Queued(model.parameters())
    return {"model": model, "optimizer": optimizer}, train(model, optimizer)


def sparse() -> Row:
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), 0.1)

    def step(number: int) -> None:
        optimizer.zero_grad()
        table(torch.tensor([number % 10, (number + 3) % 10])).square().sum().backward()
        optimizer.step()

    return {"table": table, "optimizer": optimizer}, step


def scaled() -> Row:
    model, scaler = network(), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(number: int) -> None:
        optimizer.zero_grad()
        scaler.scale(model(batch(number, 8, 4)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    return {"model": model, "optimizer": optimizer, "scaler": scaler}, step


def in_backward() -> Row:
    model = network()
    optimizers = {p: torch.optim.Adam([p], 0.05, foreach=False) for p in model.parameters()}

    def take(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(take)
    return {"model": model, "optimizers": [*optimizers.values()]}, train(model)


def tied() -> Row:
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = one.weight
    optimizers = [torch.optim.SGD(one.parameters(), 0.05, 0.9), torch.optim.Adam(other.parameters(), 0.05)]
    return {"one": one, "other": other, "both": optimizers}, train(nn.Sequential(one, other), *optimizers)


def huge() -> Row:
    """An integer of more digits than Python turns into text."""
    model, mapping = network(), {"product": 1 << 20_000}
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(number: int) -> None:
        train(model, optimizer)(number)
        mapping["product"] = mapping["product"] * 3 + number

    return {"model": model, "optimizer": optimizer, "mapping": mapping}, step


def added_up() -> Row:
    """Sums of gradients, and an optimizer that leaves parameters out whose gradients are None."""
    model, seldom = network(), nn.Linear(4, 4)
    optimizer = torch.optim.AdamW([*model.parameters(), *seldom.parameters()], 0.05, weight_decay=0.1)

    def step(number: int) -> None:
        made = model(batch(number, 8, 4))
        (seldom(made) if number == 1 else made).square().mean().backward()
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad(set_to_none=number > 7)

    return {"model": model, "seldom": seldom, "optimizer": optimizer}, step


def begins_and_ceases() -> Row:
    """A tensor that is trained from some step on, and another one until then."""
    box = {"early": torch.zeros(4, requires_grad=True), "late": torch.ones(4)}

    def step(number: int) -> None:
        if number == 3:
            box["early"], box["late"] = box["early"].detach(), box["late"].clone().requires_grad_()
        (batch(number, 4) * (box["early"] + box["late"]) + box["early"] * box["late"]).square().sum().backward()
        for tensor in box.values():
            if tensor.requires_grad and tensor.grad is not None:
                tensor.data.sub_(tensor.grad, alpha=0.01)
                tensor.grad = None

    return {"box": box}, step


class Smoothing:
    """Called by an optimizer, with a number that it moves on with."""

    def __init__(self) -> None:
        self.norm = 1.0

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        self.norm = 0.9 * self.norm + 0.1 * float(gradient.norm())
        return gradient / self.norm


def put_on_an_optimizer() -> Row:
    """An object that is called."""
    model = network()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.05)
    optimizer.smooth = Smoothing()

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(batch(number, 8, 4)).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = optimizer.smooth(parameter.grad)
        optimizer.step()

    return {"model": model, "optimizer": optimizer}, step


class Kfac(torch.optim.SGD):
    """With its factors in a dict by module, as in public K-FAC."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.05)
        self.model, self.factors = model, {}

    def step(self, closure: Any = None) -> None:
        for layer in (each for each in self.model.modules() if isinstance(each, nn.Linear)):
            squares = self.factors.setdefault(layer, torch.zeros_like(layer.weight))
            squares.lerp_(layer.weight.grad.square(), 0.1)
            layer.weight.grad /= squares.sqrt() + 0.1
        super().step()


def by_module() -> Row:
    model = network()
    optimizer = Kfac(model)
    return {"model": model, "optimizer": optimizer}, train(model, optimizer)


def on_layers() -> Row:
    """What a script puts onto torch's own layers and onto parameters."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model.history, model[0].scores, model[1].box = [], torch.zeros(4, 4), {"n": 0}
    for parameter in model.parameters():
        parameter.average = parameter.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(number: int) -> None:
        model.history.append(number)
        model[1].box["n"] += len(model.history)
        optimizer.zero_grad()
        (model(batch(number, 8, 4)) + model[1].box["n"] / 100).square().mean().backward()
        model[0].scores += model[0].weight.grad.abs()
        model[0].weight.grad *= model[0].scores > model[0].scores.median()
        optimizer.step()
        for parameter in model.parameters():
            parameter.average.lerp_(parameter.detach(), 0.1)
            parameter.data.lerp_(parameter.average, 0.01)

    return {"model": model, "optimizer": optimizer}, step


class ById:
    """An average by the ids of parameters."""

    def __init__(self) -> None:
        self.shadow: dict[int, torch.Tensor] = {}

    def __repr__(self) -> str:
        return str([each.tolist() for each in self.shadow.values()])  # ids are other ones in each process

    def update(self, parameter: torch.Tensor) -> None:
        self.shadow.setdefault(id(parameter), parameter.detach().clone()).lerp_(parameter.detach(), 0.1)
        parameter.data.lerp_(self.shadow[id(parameter)], 0.1)


def by_id() -> Row:
    model, average = network(), ById()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(number: int) -> None:
        train(model, optimizer)(number)
        for parameter in model.parameters():
            average.update(parameter)

    return {"model": model, "optimizer": optimizer, "held": {"average": average}}, step


ROWS = [
    by_module,
    on_layers,
    by_id,
    begins_and_ceases,
    put_on_an_optimizer,
    attributes,
    parameter_of_nobody,
    groups_change,
    expanded,
    queued,
    sparse,
    scaled,
    in_backward,
    tied,
    huge,
    added_up,
]


class Written:
    """A row, as `drawn.py` has its states."""

    def __init__(self, row: Callable[[], Row]) -> None:
        torch.manual_seed(1)
        self._given, self.step = row()

    def sources(self) -> dict[str, Any]:
        return self._given
