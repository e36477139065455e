"""A prefetcher around session.batches is told, and no loop without one."""

import threading
from collections.abc import Callable, Iterable, Iterator
from queue import Queue
from typing import Any

import pytest
import torch

from mt_resilient.training.data.notices import ReadAhead

STEPS = 5


class Training:
    def __init__(self, make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, optimizers: int = 1) -> None:
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = make(self.model.parameters(), lr=0.1)
        self.said: list[str] = []
        self.ahead = ReadAhead([self.optimizer] * optimizers, self.said.append)
        self.reported = False

    def batches(self) -> Iterator[torch.Tensor]:
        """As session.batches gives them."""
        for _ in range(STEPS):
            self.reported = False
            self.ahead.gives()
            yield torch.ones(3, 2)
            self.ahead.gave(self.reported)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(batch).square().mean()
        return loss

    def step(self, batch: torch.Tensor) -> None:
        self.loss(batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class Prefetcher:
    """As apex has it."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = iter(batches)
        self.next = next(self.batches, None)

    def __iter__(self) -> Iterator[Any]:
        while self.next is not None:
            current, self.next = self.next, next(self.batches, None)
            yield current


def one_late(batches: Iterable[Any]) -> Iterator[Any]:
    held: list[Any] = []
    for batch in batches:
        held.append(batch * 2.0)
        if len(held) > 2:
            yield held.pop(0)
    yield from held


def by_a_thread(batches: Iterable[Any]) -> Iterator[Any]:
    queue: Queue[Any] = Queue(2)
    thread = threading.Thread(target=lambda: [queue.put(batch) for batch in [*batches, None]], daemon=True)
    thread.start()
    yield from iter(queue.get, None)
    thread.join()


@pytest.mark.parametrize("around", [Prefetcher, one_late, by_a_thread])
def test_code_that_reads_ahead_is_reported_once(around: Callable[[Any], Iterable[Any]]) -> None:
    training = Training()
    for batch in around(training.batches()):
        training.step(batch)
    (said,) = training.said
    assert "session.batches(lambda: Prefetcher(loader), …)" in said


def test_nothing_is_reported_without_an_optimizer() -> None:
    training = Training(optimizers=0)
    for batch in Prefetcher(training.batches()):
        training.step(batch)
    assert training.said == []


def by_hand(training: Training, number: int, batch: torch.Tensor) -> None:
    """Accumulation."""
    training.loss(batch).backward()
    if number % 2:
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=True)


def scaled(training: Training, number: int, batch: torch.Tensor) -> None:
    """As a GradScaler that leaves out the first steps, and no gradient is left of them."""
    training.loss(batch).backward()
    if number > 2:
        training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=True)


def closed(training: Training, number: int, batch: torch.Tensor) -> None:
    def closure() -> float:
        training.optimizer.zero_grad()
        loss = training.loss(batch)
        loss.backward()
        return loss.item()

    training.optimizer.step(closure)


def in_backward(training: Training, number: int, batch: torch.Tensor) -> None:
    """The optimizer takes each gradient in the backward pass, and lets it go."""

    def take(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    hooks = [each.register_post_accumulate_grad_hook(take) for each in training.model.parameters()]
    training.loss(batch).backward()
    for hook in hooks:
        hook.remove()


def only_reported(training: Training, number: int, batch: torch.Tensor) -> None:
    """Its first step is computed elsewhere."""
    training.reported = True
    if number:
        training.step(batch)


def never(training: Training, number: int, batch: torch.Tensor) -> None:
    """Without gradients of torch's."""


def warming_up(training: Training, number: int, batch: torch.Tensor) -> None:
    """It first gathers samples."""
    if number >= 3:
        training.step(batch)


@pytest.mark.parametrize("step", [by_hand, scaled, closed, in_backward, only_reported, never, warming_up])
def test_a_loop_that_reads_nothing_ahead_is_not_suspected(step: Callable[[Training, int, torch.Tensor], None]) -> None:
    training = Training(torch.optim.LBFGS if step is closed else torch.optim.SGD)
    for number, batch in enumerate(training.batches()):
        step(training, number, batch)
    assert training.said == []
