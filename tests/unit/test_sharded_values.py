"""DTensors among values: each rank's own part comes back, into the live tensor or onto the mesh of the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_module, distribute_tensor

from mt_resilient.resilience.errors import LayoutError, SnapshotError

from .lives import Life


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    yield
    distributed.destroy_process_group()


def sharded() -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))

    def cut(_: str, module: nn.Module, mesh: Any) -> None:
        for name, parameter in [*module.named_parameters(recurse=False)]:
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))

    return distribute_module(nn.Linear(2, 4), mesh, cut)


def averages(model: nn.Module) -> dict[str, Any]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_an_average_of_sharded_weights_comes_back() -> None:
    model = sharded()
    state = {"ema": averages(model), "weight": model.weight}
    life = Life(state=state, model=model)
    kept, before = life.snapshot(), {name: each.full_tensor().clone() for name, each in state["ema"].items()}
    held = dict(state["ema"])
    for each in state["ema"].values():
        each.to_local().add_(1)
    life.restore(kept)
    other = sharded()
    empty: dict[str, Any] = {}
    Life(state=empty, model=other).restore(kept)
    for found, parameter in ((state, model), (empty, other)):
        assert {*found["ema"]} == {*before}
        assert all(torch.equal(found["ema"][name].full_tensor(), each) for name, each in before.items())
        assert all(isinstance(each, DTensor) for each in found["ema"].values())
        assert found["weight"] is parameter.weight
    assert all(state["ema"][name] is each for name, each in held.items()), "in place"


def test_without_such_a_mesh_it_is_refused_with_the_cure() -> None:
    state = {"ema": averages(sharded())}
    kept = Life(state=state).snapshot()
    with pytest.raises(LayoutError, match=r"on a mesh of \[1\] ranks.*keep its .to_local"):
        Life(state={}).restore(kept)


def test_sums_that_have_not_been_made_are_refused() -> None:
    mesh = init_device_mesh("cpu", (1,))
    with pytest.raises(SnapshotError, match=r"state\['it'\] can't be saved: it is placed as P.*full_tensor"):
        Life(state={"it": DTensor.from_local(torch.ones(2), mesh, [Partial()])}).snapshot()
