"""Modules and tensors of the Session that are keys or values of something else, also by `id()`: they are pointed to, and found again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mt_resilient.resilience.errors import SnapshotError

from .lives import Life, Made, comes_back


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


class Kfac(torch.optim.SGD):
    """With dicts by module, as K-FAC's implementations have them: as attributes, in its state, and in groups."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(
            [{"params": list(m.parameters()), "mod": m} for m in model if isinstance(m, nn.Linear)], lr=0.1
        )
        self.layers = [group["mod"] for group in self.param_groups]
        self.factors: dict[Any, Any] = {}
        self.pairs: dict[Any, int] = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for number, layer in enumerate(self.layers):
            self.factors[layer] = self.factors.get(layer, torch.zeros(2)) + number + 1
            self.state[layer]["n"] = self.state[layer].get("n", number) + 1
            self.pairs[layer, "n"] = self.pairs[id(layer)] = number

    def looks(self) -> Any:
        return [
            (self.factors[m].tolist(), self.state[m]["n"], self.pairs[m, "n"], self.pairs[id(m)], len(self.factors))
            for m in self.layers
        ]


class Average:
    """By parameters and by their ids, some of which come later."""

    def __init__(self, model: nn.Module) -> None:
        self.model_parameters = list(model.parameters())
        self.shadow = {id(p): p.detach().clone() for p in self.model_parameters[:2]}
        self.seen: set[int] = set()
        self.order: list[int] = []
        self.numbers = [1 << 60, 3, 1 << 40]
        self.momentum = {p: torch.zeros(2) for p in self.model_parameters}
        self.frozen = {self.model_parameters[0]}

    def update(self) -> None:
        for p in self.model_parameters:
            self.shadow[id(p)] = self.shadow.get(id(p), torch.zeros_like(p.detach())) * 0.5 + p.detach()
        self.seen.add(id(self.model_parameters[-1]))
        self.order = [id(p) for p in reversed(self.model_parameters)]
        self.momentum = {p: self.momentum[p] + number for number, p in enumerate(reversed(self.model_parameters))}
        self.frozen.add(self.model_parameters[-1])

    def looks(self) -> Any:
        ids = [*map(id, self.model_parameters)]
        shadow = [self.shadow[each].tolist() if each in self.shadow else None for each in ids]
        return (
            shadow,
            [each in self.seen for each in ids],
            [ids.index(each) for each in self.order],
            len(self.shadow),
            [(ids.index(id(p)), mean.tolist()) for p, mean in self.momentum.items()],
            [p in self.frozen for p in self.model_parameters],
        )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.owner = nn.Linear(4, 4), None


class Net(nn.Module):
    """Knows its own blocks by dicts, and they know it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.calls: dict[Any, int] = {}
        self.by_name = {"first": self.blocks[0]}
        self.__dict__["active"] = self.blocks[0]
        for block in self.blocks:
            block.__dict__["owner"] = self

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block.inner(inputs)
            self.calls[block] = self.calls.get(block, 0) + 1
        self.__dict__["active"] = self.blocks[1]
        self.by_name["last"] = self.blocks[1]
        return inputs

    def looks(self) -> Any:
        names = {name: [*self.blocks].index(block) for name, block in self.by_name.items()}
        return (
            [self.calls.get(each, 0) for each in self.blocks],
            names,
            [*self.blocks].index(self.active),
            len(self.calls),
        )


def kfac() -> Made:
    model = network()
    optimizer = Kfac(model)
    return {"model": model, "optimizer": optimizer}, lambda _: optimizer.step(), optimizer.looks


def average() -> Made:
    model = network()
    made = Average(model)
    return {"ema": {"it": made}, "model": model}, lambda _: made.update(), made.looks


def net() -> Made:
    model = Net()
    return {"model": nn.Sequential(model)}, lambda _: model(torch.ones(1, 4)), model.looks


@pytest.mark.parametrize("make", [kfac, average, net])
@pytest.mark.parametrize("kept_at", [1, 2])
def test_what_is_kept_by_module_or_id_comes_back(make: Callable[[], Made], kept_at: int) -> None:
    comes_back(make, kept_at, 1, begun=False)


def test_numbers_that_are_no_ids_stay_numbers() -> None:
    state = {"keys": {1 << 60: 1, 5: 2, "a": 3}, "list": [1 << 60, 1 << 61], "set": {1 << 60}, "ids": [1 << 40, 7]}
    life = Life(state=state, model=network())
    kept = life.snapshot()
    other: dict[str, Any] = {}
    Life(state=other, model=network()).restore(kept)
    assert other == state
    assert b'"id"' not in kept[0]


def test_a_key_that_the_session_does_not_know_is_refused_by_name() -> None:
    model, stranger = network(), network()
    optimizer = Kfac(model)
    stranger[0].weight = model[0].weight
    optimizer.factors[stranger] = 1
    with pytest.raises(SnapshotError, match=r"optimizer.factors.* a Sequential that the Session does not know"):
        Life(model=model, optimizer=optimizer).snapshot()
