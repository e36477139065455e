"""Gradients that are added up over several steps of a session are told of; ordinary loops are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from mt_resilient.training.accumulation import SAID, Accumulation


def told(loop: Callable[[nn.Module, torch.optim.Optimizer], Iterator[None]]) -> list[str]:
    model = nn.Linear(2, 1)
    said: list[str] = []
    accumulation = Accumulation([model], said.append)
    for _ in loop(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        accumulation.crossed()
    accumulation._hook.remove()
    return said


def backward(model: nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("every", [2, 4])
@pytest.mark.parametrize("to_none", [True, False])
def test_added_up_over_steps(every: int, to_none: bool) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        for step in range(20):
            backward(model)
            if (step + 1) % every == 0:
                optimizer.step()
                optimizer.zero_grad(to_none)
            yield

    assert told(loop) == [SAID]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("to_none", [True, False])
def test_an_ordinary_loop(first: bool, to_none: bool) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        for step in range(20):
            if first:
                optimizer.zero_grad(to_none)
            backward(model)
            if step not in (0, 1, 9):  # a loss scaler leaves a step out now and then
                optimizer.step()
            if not first:
                optimizer.zero_grad(to_none)
            yield

    assert told(loop) == []
