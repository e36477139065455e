"""Parameters and optimizers in the order of a set, which is another one in each process; and optimizers that have one state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from .lives import Life

SIZES = 5
ORDERS = [(0, 1, 2, 3, 4), (3, 1, 4, 0, 2), (4, 3, 2, 1, 0)]


class Net(nn.Module):
    """Its layers are alike: moments that come to another one fit as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(SIZES))
        self.held: dict[Any, Any] = {}


class Outer(torch.optim.Optimizer):
    def __init__(self, held: dict[Any, torch.optim.Optimizer]) -> None:
        super().__init__([p for each in held.values() for p in each.param_groups[0]["params"]], {})
        self.held = held

    def step(self, closure: Any = None) -> None:
        for each in self.held.values():
            each.step()


def adam(layer: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(layer.parameters(), 0.1)


def in_the_module(net: Net, order: Any) -> Any:
    net.held = {id(net.layers[at].weight): adam(net.layers[at]) for at in order}
    return {"of": net.held}


MAKERS: dict[str, Callable[[Net, Any], Any]] = {
    "in one group": lambda net, order: torch.optim.Adam([*(net.layers[at].weight for at in order)], 0.1),
    "by parameter": lambda net, order: {net.layers[at].weight: adam(net.layers[at]) for at in order},
    "by layer": lambda net, order: {"by": {net.layers[at]: adam(net.layers[at]) for at in order}},
    "by id": lambda net, order: {id(net.layers[at].weight): adam(net.layers[at]) for at in order},
    "in the module": in_the_module,
    "within an optimizer": lambda net, order: Outer({net.layers[at].weight: adam(net.layers[at]) for at in order}),
}


def optimizers(held: Any) -> list[torch.optim.Optimizer]:
    if isinstance(held, Outer):
        return [*held.held.values()]
    if isinstance(held, torch.optim.Optimizer):
        return [held]
    return [each for value in held.values() for each in (value.values() if isinstance(value, dict) else [value])]


def train(net: Net, held: Any, steps: int) -> None:
    for step in range(steps):
        for number, layer in enumerate(net.layers):
            layer.weight.grad = torch.full((3, 3), float(number + 1 + step))
        for each in optimizers(held):
            each.step()


@pytest.mark.parametrize("how", MAKERS)
@pytest.mark.parametrize("first", ORDERS)
@pytest.mark.parametrize("second", ORDERS)
def test_moments_come_back_to_their_parameters(how: str, first: Any, second: Any) -> None:
    def restarted(order: Any, snapshot: Any) -> tuple[Net, Any, Life]:
        net = Net()
        held = MAKERS[how](net, order)
        life = Life(model=net, held=held)
        if snapshot is not None:
            life.restore(snapshot)
        return net, held, life

    net, held, life = restarted(first, None)
    train(net, held, 3)
    snapshot = life.snapshot()
    train(net, held, 2)
    expected = [layer.weight.clone() for layer in net.layers]
    for order in (second, ORDERS[1]):  # the second one is a restart of the restart
        net, held, life = restarted(order, snapshot)
        snapshot = life.snapshot()
        train(net, held, 2)
        assert all(torch.equal(layer.weight, wanted) for layer, wanted in zip(net.layers, expected, strict=True))


class Own(torch.optim.Optimizer):
    """Not torch's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("sum", torch.zeros_like(parameter)).add_(1.0)
            parameter.sub_(state["sum"])


class Around(torch.optim.Optimizer):
    """As Accelerate's, and as a Lookahead that has its base's groups and state."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.optimizer = base

    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    defaults = property(lambda self: self.optimizer.defaults)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()


@pytest.mark.parametrize("framework", [False, True], ids=["the script's", "a framework's"])
def test_a_state_that_two_optimizers_have_is_restored_once(framework: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if framework:
        monkeypatch.setattr(Around, "__module__", "accelerate.optimizer")

    def training() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Linear(4, 2)
        return model, Around(Own(model.parameters()))

    model, optimizer = training()
    life = Life(model=model, optimizer=optimizer)
    optimizer.step()
    kept = {key: dict(state) for key, state in enumerate(optimizer.state.values())}
    assert all(kept.values())
    snapshot = life.snapshot()
    life.restore(snapshot)
    assert repr({key: dict(state) for key, state in enumerate(optimizer.state.values())}) == repr(kept)
    model, other = training()
    Life(model=model, optimizer=other).restore(snapshot)
    assert repr({key: dict(state) for key, state in enumerate(other.state.values())}) == repr(kept)


class Annotating:
    """As tensordict's: it wants the attribute of what its `state_dict` gave, also of what is nested."""

    def __init__(self, value: float) -> None:
        self.value = torch.tensor(value)

    def state_dict(self) -> Any:
        inner, outer = OrderedDict(value=self.value), OrderedDict[str, Any]()
        inner._metadata = {"shape": torch.Size([4])}  # type: ignore[attr-defined]
        outer["next"], outer._metadata = inner, {"nested": True}  # type: ignore[attr-defined]
        return outer

    def load_state_dict(self, state: Any) -> None:
        assert state._metadata == {"nested": True}
        assert state["next"]._metadata == {"shape": torch.Size([4])}
        self.value = state["next"]["value"]


def test_a_state_dict_comes_back_with_its_attributes() -> None:
    snapshot = Life(replay=Annotating(3.0)).snapshot()
    other = Annotating(0.0)
    Life(replay=other).restore(snapshot)
    assert other.value == 3.0


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.opt = torch.optim.Adam(self.parameters(), 0.1)


class Stack(nn.Module):
    """torch knows nothing of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [Layer(), Layer()]


def test_optimizers_of_modules_in_a_list_are_sources() -> None:
    net = Stack()
    assert {"net.layers.0.opt", "net.layers.1.opt"} <= Life(net=net).sources.keys()
