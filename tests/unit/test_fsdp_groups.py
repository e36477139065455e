"""A state that is collected after an evaluation has the shards of FSDP2's parameters, and can be restored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Shard

from mt_resilient.training.state.modules.module_source import Modules
from mt_resilient.training.state.optimizers.accumulated_gradients import Accumulation, Halfway
from mt_resilient.training.state.optimizers.optimizers import Optimizers
from mt_resilient.training.state.tensors.fsdp_groups import groups

from .lives import Life


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    yield
    distributed.destroy_process_group()


def sharded() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    for layer in (model[1], model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    return model


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(1, 2))


def test_parameters_that_an_evaluation_has_gathered_are_saved_and_restored_as_shards() -> None:
    model = sharded()
    weight = model[0].weight
    life = Life(model=model)
    evaluate(model)
    assert model[0].weight is not weight, "gathered"
    kept = life.snapshot()
    assert model[0].weight is weight
    with torch.no_grad():
        before = weight.full_tensor().clone()
        weight.to_local().add_(1)
    evaluate(model)
    life.restore(kept)
    other = sharded()
    Life(model=other).restore(kept)
    assert all(torch.equal(each[0].weight.full_tensor(), before) for each in (model, other))


def test_a_model_that_is_gathered_at_first_is_read_as_shards() -> None:
    model = sharded()
    evaluate(model)
    assert all(isinstance(each, DTensor) for each in Modules([model]).named()[0].values())


@pytest.mark.skipif(not hasattr(_fsdp_common, "ShardPlacementResult"), reason="torch before 2.13 has no such groups")
def test_a_module_with_several_groups_of_parameters_is_trained_and_restored() -> None:
    model: Any = nn.Linear(2, 3)
    meshes = [init_device_mesh("cpu", (1,)), DeviceMesh.from_group(distributed.new_group([0]), "cpu")]
    placed = {
        id(each): _fsdp_common.ShardPlacementResult(Shard(0), _fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0))
        for each, mesh in zip(model.parameters(), meshes, strict=True)
    }
    fully_shard(model, mesh=meshes[0], shard_placement_fn=lambda parameter: placed[id(parameter)])
    assert len(groups(model)) == 2
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    told: list[str] = []
    source = Modules([model])
    accumulation = Accumulation([source], [Optimizers(optimizer)], [], told.append)
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 2)).sum().backward()
    source.collect()
    with pytest.raises(Halfway):
        accumulation.collect()
    accumulation.restore({})
    found = accumulation.collect()
    accumulation.release()
    assert found == {}
