"""Megatron's own optimizer that offloads to the CPU continues from a snapshot with the same bits, in place and in a new process. Parameters
that say that they are on a device stand in for a device."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from .lives import Life

hybrid_optimizer = pytest.importorskip(
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer", reason="scripts/megatron is needed"
)


class OnDevice(nn.Parameter):
    is_cuda = True


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        for number in range(3):
            self.register_parameter(f"weight{number}", OnDevice(torch.randn(4, dtype=dtype)))


class Wrapper:
    """As Megatron's wrappers around a torch optimizer."""

    __module__ = "megatron.core.optimizer.optimizer"

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    event = SimpleNamespace(synchronize=lambda: None, wait=lambda stream: None)
    stream = SimpleNamespace(wait_stream=lambda other: None, record_event=lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda given: nullcontext())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)


class Training:
    def __init__(self, dtype: torch.dtype) -> None:
        self.model = Model(dtype)
        self.optimizer = hybrid_optimizer.HybridDeviceOptimizer(
            list(self.model.parameters()),
            offload_fraction=1.0,
            cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=torch.optim.AdamW,
            param_update_in_fp32=True,
            pin_cpu_grads=False,
            overlap_cpu_optimizer_d2h_h2d=False,
            lr=0.1,
        )
        self.life = Life(model=self.model, optimizer=Wrapper(self.optimizer))

    def step(self, number: int) -> None:
        """The last parameter has no gradient until step 4."""
        generator = torch.Generator().manual_seed(number)
        for at, parameter in enumerate(self.model.parameters()):
            gradient = torch.randn(4, generator=generator).to(parameter.dtype)
            parameter.grad = None if at == 2 and number < 4 else gradient
        self.optimizer.step()

    def bits(self) -> list[bytes]:
        return [each.detach().float().numpy().tobytes() for each in self.model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("taken", [0, 1, 3, 5])
def test_the_next_steps_have_the_same_bits(taken: int, dtype: torch.dtype) -> None:
    training, expected = Training(dtype), []
    for number in range(8):
        if number == taken:
            kept = training.life.snapshot()
        training.step(number)
        expected.append(training.bits())
    for other in (training, Training(dtype)):
        other.life.restore(kept)
        for number in range(taken, 8):
            other.step(number)
            assert other.bits() == expected[number]
