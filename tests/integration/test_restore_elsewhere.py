"""Live modules and optimizers are restored from a snapshot of another layout. What only one of the former ranks held is refused or told."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.testing._internal.distributed.fake_pg import FakeStore

from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.checkpoint.durable.load_resharded import Saved
from mt_resilient.checkpoint.durable.snapshot_view import Contents
from mt_resilient.cli import main
from mt_resilient.formats import dcp_export
from mt_resilient.formats.export import export
from mt_resilient.resilience.errors import LayoutError
from mt_resilient.training.snapshot.restore_resharded import parts_of, restore_elsewhere
from mt_resilient.training.state.modules.module_source import Modules
from mt_resilient.training.state.optimizers.optimizers import Optimizers
from mt_resilient.training.state.sharding import model_parts
from mt_resilient.training.state.sources import Source

from .test_reshard import save_states

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """This process is rank 0 of two. Its collectives do nothing."""
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    distributed.destroy_process_group()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(inputs))


def sources(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Source]:
    found: dict[str, Source] = {"model": (modules := Modules([model], name="model"))}
    if optimizer is not None:
        found["optimizer"] = source = Optimizers(optimizer)
        source.parameters.append(lambda: modules.known_as("model"))
    return found


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer


def snapshot(root: Path, *ranks: Mapping[str, Source], beside: tuple[int, ...] = ()) -> Files:
    """A snapshot in which each rank holds a copy of all tensors with places. beside: indexes after the rank's own."""
    states = []
    for rank, each in enumerate(ranks):
        state = {name: source.collect() for name, source in each.items()}
        places = {
            name: [replace(part, replica=(rank, *beside)) for part in parts] for name, parts in parts_of(each).items()
        }
        states.append((copy.deepcopy(state), places))
    return save_states(root, states)


def restored(place: Files, into: Mapping[str, Source]) -> None:
    restore_elsewhere(place, into, alone=(), optional=())


def changed(model: nn.Module, name: str, by: float) -> nn.Module:
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_parameter(name).add_(by) if "." in name else other.get_buffer(name).add_(by)
    return other


# Copies that are none


def test_a_parameter_that_each_rank_has_trained_for_itself_is_refused(tmp_path: Path, capsys: Capture) -> None:
    net = Net()
    ranks = [sources(each, trained(each, torch.optim.Adam(each.parameters()))) for each in (net, Net())]
    with torch.no_grad():
        ranks[1]["model"].chunks[0].last.weight.add_(1e-6)  # type: ignore[attr-defined]
    place = snapshot(tmp_path, *ranks)
    said = "ranks 0 and 1 have different values of model/last.weight, and each of them counts as a copy of the whole"
    into = Net()
    with pytest.raises(LayoutError, match=said):
        restored(place, sources(into, torch.optim.Adam(into.parameters())))
    assert torch.equal(into.last.weight, Net().last.weight), "nothing was restored"
    assert main(["snapshots", "export", str(tmp_path), "--to", "dcp", str(tmp_path / "out")]) == LayoutError.exit_code
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_optimizer_s_tensor_that_differs_is_refused_and_its_count_is_not(tmp_path: Path) -> None:
    nets = Net(), Net()
    optimizers = [trained(net, torch.optim.Adam(net.parameters())) for net in nets]
    optimizers[1].state[nets[1].first.bias]["step"] += 1
    into = Net()
    place = snapshot(tmp_path / "step", *map(sources, nets, optimizers))
    restored(place, sources(into, optimizer := torch.optim.Adam(into.parameters())))
    assert optimizer.state[into.first.bias]["step"] == 1
    optimizers[1].state[nets[1].first.bias]["exp_avg"] += 1
    with pytest.raises(LayoutError, match=r"different values of optimizer/exp_avg/model/first\.bias"):
        restored(snapshot(tmp_path / "sum", *map(sources, nets, optimizers)), sources(into, optimizer))


def test_an_export_of_the_model_does_not_need_equal_optimizers(tmp_path: Path) -> None:
    nets = Net(), Net()
    optimizers = [trained(net, torch.optim.Adam(net.parameters())) for net in nets]
    optimizers[1].state[nets[1].first.bias]["exp_avg"] += 1
    snapshot(tmp_path, *map(sources, nets, optimizers))
    export = ["snapshots", "export", str(tmp_path), "--to", "dcp"]
    assert main([*export, "--only", "model", str(tmp_path / "model")]) == 0
    assert main([*export, str(tmp_path / "whole")]) == LayoutError.exit_code


def test_a_look_at_the_state_of_a_frozen_parameter_hides_no_positions(tmp_path: Path) -> None:
    """An optimizer's `state` is a defaultdict, so a look adds an empty entry."""
    net = Net()
    net.first.requires_grad_(False)
    optimizer = trained(net, torch.optim.Adam(net.last.parameters()))
    assert optimizer.state[net.first.weight] == {}
    assert sources(net, optimizer)["optimizer"].by_parameter  # type: ignore[attr-defined]


def test_a_buffer_that_differs_is_the_first_rank_s(tmp_path: Path, capsys: Capture) -> None:
    net, into = changed(Net(), "seen", 1), Net()
    place = snapshot(tmp_path / "run", sources(net), sources(changed(net, "seen", 1)))
    restored(place, sources(into))
    assert into.seen.tolist() == [1, 1]
    assert "seen of 'model' differs from rank to rank in the snapshot" in capsys.readouterr().err
    told = export(place, dcp_export.write, tmp_path / "dcp")
    assert told.endswith(". model/seen differs from rank to rank: the value is that of replica 0")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_that_are_not_data_parallel_may_differ_by_rounding(
    tmp_path: Path, capsys: Capture, dtype: torch.dtype
) -> None:
    net, into = Net().to(dtype), Net().to(dtype)
    rounded = changed(net, "last.weight", 1e-3)
    place = snapshot(tmp_path / "rounded", sources(net), sources(rounded), beside=(0,))
    assert Saved(place).manifests[0].fingerprints != Saved(place).manifests[1].fingerprints
    restored(place, sources(into))
    assert torch.equal(into.last.weight, net.last.weight)
    assert "last.weight of 'model' differs from rank to rank in the snapshot" in capsys.readouterr().err
    apart = snapshot(tmp_path / "apart", sources(net), sources(changed(net, "last.weight", 0.1)), beside=(0,))
    with pytest.raises(LayoutError, match=r"different values of model/last\.weight"):
        restored(apart, sources(into))


@pytest.mark.usefixtures("two_ranks")
def test_only_copies_under_ddp_count_as_data_parallel() -> None:
    """A mesh does not tell: tensor-parallel ranks have copies too, and these may differ by rounding."""
    (part,) = model_parts([DistributedDataParallel(nn.Linear(2, 2, bias=False))])["module.weight"]
    assert len(part.replica) == 1
    mixed = nn.Linear(2, 2)
    mesh = init_device_mesh("cpu", (2,))
    mixed.weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Replicate()]))
    assert {name: parts[0].replica for name, parts in model_parts([mixed]).items()} == {
        "weight": (0, 0, 0),
        "bias": (0, 0),
    }


@pytest.mark.usefixtures("two_ranks")
def test_the_shards_of_a_compiled_fsdp_model_are_no_copies() -> None:
    compiled = torch.compile(FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")))
    assert not any(model_parts([compiled]).values())  # type: ignore[list-item]
    wrapped = torch.compile(DistributedDataParallel(nn.Linear(2, 2)))
    assert all(model_parts([wrapped]).values())  # type: ignore[list-item]


# Buffers without a known position


@pytest.mark.usefixtures("two_ranks")
def test_a_wrapper_s_own_buffer_comes_over_where_all_ranks_had_the_same(tmp_path: Path, capsys: Capture) -> None:
    def averaged() -> AveragedModel:
        return AveragedModel(DistributedDataParallel(Net()))

    ranks, into = [averaged(), averaged()], averaged()
    for each in ranks:
        each.update_parameters(DistributedDataParallel(Net()))
    restored(snapshot(tmp_path / "alike", *map(sources, ranks)), sources(into))
    assert into.n_averaged == 1
    ranks[1].update_parameters(DistributedDataParallel(Net()))
    into = averaged()
    restored(snapshot(tmp_path / "apart", *map(sources, ranks)), sources(into))
    assert into.n_averaged == 0
    assert "the position of the buffer n_averaged of 'model' is not known, and it differed" in capsys.readouterr().err


# What has no position


def test_a_parameter_of_hidden_tensors_has_no_known_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of float8 weights and torchao's: the state has their parts under other names."""
    net = Net()
    place = snapshot(tmp_path, sources(net), sources(net))
    into = sources(Net())
    monkeypatch.setattr(
        into["model"], "tensors", lambda: {"first.weight._data": torch.ones(2), "last.bias": torch.ones(2)}
    )
    with pytest.raises(LayoutError, match=r"the position of first\.weight\._data of 'model' is not known"):
        restored(place, into)


@pytest.mark.usefixtures("two_ranks")
def test_an_incomplete_sum_has_no_known_position(tmp_path: Path) -> None:
    place = snapshot(tmp_path, sources(Net()), sources(Net()))
    into = Net()
    partial = DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (2,)), [Partial()])
    into.first.bias = nn.Parameter(partial)
    with pytest.raises(LayoutError, match=r"the position of a tensor is not known \(first\.bias: a partial DTensor"):
        restored(place, sources(into))


# Groups without state, and with equal options


def of_three(net: nn.Module, rates: tuple[float, ...] = (0.5, 0.25, 0.125)) -> torch.optim.Optimizer:
    """The last two groups have no state: one is frozen, one has no gradient."""
    net.last.weight.requires_grad_(False)  # type: ignore[union-attr]
    listed = [[*net.first.parameters()], [net.last.weight], [net.last.bias]]  # type: ignore[union-attr]
    return torch.optim.Adam([{"params": params, "lr": lr} for params, lr in zip(listed, rates, strict=True)])


def test_groups_without_state_keep_their_own_options(tmp_path: Path) -> None:
    nets = Net(), Net()
    optimizers = [of_three(net) for net in nets]
    for net, optimizer in zip(nets, optimizers, strict=True):
        net.first(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    place = snapshot(tmp_path, *map(sources, nets, optimizers))
    into = Net()
    restored(place, sources(into, optimizer := of_three(into, (1.0, 1.0, 1.0))))
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25, 0.125]
    groups = Contents(Saved(place)).values["optimizer"]["param_groups"]
    assert [(group["lr"], len(group["params"])) for group in groups] == [(0.5, 2), (0.25, 0), (0.125, 0)]


def test_a_learning_rate_that_is_a_tensor_keeps_no_export_from_being(tmp_path: Path) -> None:
    net = Net()
    optimizer = trained(net, torch.optim.Adam(net.parameters(), lr=torch.tensor(0.5)))
    contents = Contents(Saved(snapshot(tmp_path, sources(net, optimizer), sources(net, optimizer))))
    (group,) = contents.values["optimizer"]["param_groups"]
    assert len(group["params"]) == 4


def test_a_stateless_parameter_does_not_change_the_options_of_its_group(tmp_path: Path) -> None:
    def made(net: Net, rate: float) -> torch.optim.Optimizer:
        return torch.optim.Adam([{"params": net.first.parameters(), "lr": rate}, {"params": [], "lr": 0.5}])

    net, into = Net(), Net()
    net.first.weight.grad = torch.ones(4, 3)  # the bias, the last of its group, has none
    (optimizer := made(net, 0.25)).step()
    restored(snapshot(tmp_path, sources(net, optimizer)), sources(into, other := made(into, 1.0)))
    assert other.param_groups[0]["lr"] == 0.25


def test_torch_loads_an_export_with_groups_of_equal_options(tmp_path: Path) -> None:
    def made(net: Net, rate: float) -> torch.optim.Optimizer:
        return torch.optim.Adam([{"params": each.parameters()} for each in (net.first, net.last)], lr=rate)

    net = Net()
    optimizer = trained(net, made(net, 0.25))
    place = snapshot(tmp_path / "run", sources(net, optimizer), sources(net, optimizer))
    export(place, dcp_export.write, tmp_path / "dcp")
    into = Net()
    weights, states = get_state_dict(into, other := made(into, 1.0))
    state: dict[str, Any] = {"model": weights, "optimizer": states}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    set_state_dict(into, other, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert [group["lr"] for group in other.param_groups] == [0.25, 0.25]
    for parameter, same in zip(net.parameters(), into.parameters(), strict=True):
        assert torch.equal(parameter, same)
        assert torch.equal(optimizer.state[parameter]["exp_avg"], other.state[same]["exp_avg"])
