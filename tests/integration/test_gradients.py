"""Each rank's own gradient under DistributedDataParallel, with real processes: what is noted is what this rank alone would have computed,
and the training has the same bits whether it is noted or not."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mt_resilient.training.boundary.local_gradients import OwnGradients

from .. import harness

RANKS, STEPS = 3, 12


def _model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def _trained(rank: int, noted: bool) -> tuple[torch.Tensor, OwnGradients, list[float]]:
    """Parameters in one, what was noted, and the norms that this rank would have had by itself."""
    model = _model()
    parallel = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
    own, alone = OwnGradients([parallel], noted), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank)
    for step in range(1, STEPS + 1):
        inputs, far = torch.randn(16, 8, generator=data), 1e4 if (rank, step) == (1, STEPS) else 1.0
        apart = _model()
        apart.load_state_dict(model.state_dict())
        (apart(inputs) - far).square().mean().backward()
        alone.append(math.hypot(*(float(torch.linalg.vector_norm(p.grad)) for p in apart.parameters())))
        optimizer.zero_grad()
        (parallel(inputs) - far).square().mean().backward()
        own.stepped(step)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), own, alone


def _rank(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    (with_it, own, alone), (without, nothing, _) = _trained(rank, True), _trained(rank, False)
    assert torch.equal(with_it, without)
    assert nothing.times_usual(STEPS) == 0
    usual = sorted(alone[:-1])[(STEPS - 1) // 2]
    assert math.isclose(own.times_usual(STEPS), alone[-1] / usual, rel_tol=1e-5)
    assert (own.times_usual(STEPS) > 100) == (rank == 1)
    own.went_back(3)
    assert own.times_usual(STEPS) == own.times_usual(2) == 0  # gone; and too little is known of what is usual


def test_it_is_this_ranks_own_and_changes_nothing(tmp_path: Path) -> None:
    assert harness.exit_codes(_rank, RANKS, (tmp_path / "store").as_uri()) == [0] * RANKS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64, torch.complex128])
def test_gradients_of_any_type_are_noted(dtype: torch.dtype) -> None:
    model = nn.Linear(4, 4, dtype=dtype)
    own = OwnGradients([model], noted=True)
    for step in range(1, STEPS + 1):
        model.zero_grad()
        scale = 100 if step == STEPS else 1
        (model(torch.ones(2, 4, dtype=dtype)) * scale).abs().sum().backward()
        own.stepped(step)
    assert math.isclose(own.times_usual(STEPS), 100, rel_tol=0.01)
