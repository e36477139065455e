"""torch's optimizers that wrap others and keep nothing that their own `state_dict` gives away without a collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.optim.named_optimizer import _NamedOptimizer
from torch.nn.parallel import DistributedDataParallel

from mt_resilient.training.state.modules.module_source import Modules

from ..unit.lives import Life


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=(tmp_path / "meeting").as_uri(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def zero(model: nn.Module) -> Any:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.05)


def local_sgd(model: nn.Module) -> Any:
    averager = PeriodicModelAverager(period=3, warmup_steps=2)
    return PostLocalSGDOptimizer(optim=torch.optim.SGD(model.parameters(), 0.05, 0.9), averager=averager)


def named(model: nn.Module) -> Any:
    return _NamedOptimizer(model.named_parameters(), torch.optim.Adam, lr=0.05)


def trained(model: nn.Module, optimizer: Any, first: int, last: int) -> list[Any]:
    for step in range(first, last):
        model.zero_grad()
        model(torch.randn(3, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
    counted = getattr(getattr(optimizer, "averager", None), "step", 0)
    return [counted, *(p.tolist() for p in model.parameters())]


@pytest.mark.parametrize("make", [zero, local_sgd, named])
def test_goes_on_to_the_same_bits(make: Callable[[nn.Module], Any]) -> None:
    def begun() -> tuple[nn.Module, Any, Life]:
        torch.manual_seed(1)
        model = nn.Linear(4, 2)
        optimizer = make(model)
        return model, optimizer, Life(model=model, optimizer=optimizer)

    model, optimizer, life = begun()
    life.snapshot()
    trained(model, optimizer, 0, 4)
    kept = life.snapshot()
    expected = trained(model, optimizer, 4, 9)
    life.restore(kept)
    assert trained(model, optimizer, 4, 9) == expected, "after a rewind in place"
    model, optimizer, life = begun()
    life.restore(kept)
    assert trained(model, optimizer, 4, 9) == expected, "in a new process"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: (None, fp16_compress_hook), ""),
        (lambda: (dist.group.WORLD, fp16_compress_hook), ""),
        (lambda: (PowerSGDState(dist.group.WORLD), powerSGD_hook), "powerSGD_hook"),
    ],
)
def test_a_communication_hook_that_has_a_state_is_found(make: Callable[[], Any], told: str) -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    model.register_comm_hook(*make())
    assert Modules([model]).hooked() == told
    assert Modules([model.module]).hooked([model]) == told, "whichever of them the session is given"
    assert Modules([nn.Linear(2, 2)]).hooked([model]) == ""
