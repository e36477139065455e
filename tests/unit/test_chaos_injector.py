"""Faults inside a rank: each changes what it says, once, when it is ordered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from mt_resilient.chaos.rank import injector
from mt_resilient.chaos.rank.injector import FAULTS, STARTS, _obey, _start


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    model = nn.Linear(3, 2)
    made = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    made.step()
    return made


def parts(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    first = optimizer.param_groups[0]["params"][0]
    return {"parameter": first.detach(), "gradient": first.grad, "moment": optimizer.state[first]["exp_avg"]}


@pytest.mark.parametrize(
    ("fault", "part"),
    [
        ("nan_in_gradient", "gradient"),
        ("inf_in_gradient", "gradient"),
        ("bit_in_gradient", "gradient"),
        ("bit_in_parameter", "parameter"),
        ("bit_in_moment", "moment"),
    ],
)
def test_a_fault_changes_one_element_once(
    fault: str, part: str, optimizer: torch.optim.Optimizer, tmp_path: Path
) -> None:
    before = {name: tensor.clone() for name, tensor in parts(optimizer).items()}
    order = tmp_path / "rank-0"
    order.write_text(fault)
    _obey(order, optimizer)
    after = {name: tensor.clone() for name, tensor in parts(optimizer).items()}
    assert {name: int((after[name] != before[name]).sum()) for name in after} == {**dict.fromkeys(after, 0), part: 1}
    _obey(order, optimizer)
    assert all(torch.equal(parts(optimizer)[name], after[name]) or name == part for name in after)
    assert order.with_suffix(".taken").exists()


@pytest.fixture
def group() -> Iterator[None]:
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("fault", ["nan_in_gradient", "bit_in_gradient", "bit_in_parameter", "bit_in_moment"])
def test_a_fault_strikes_the_rank_s_own_part_of_a_sharded_tensor(fault: str, tmp_path: Path) -> None:
    """As FSDP2 divides it. The faults call no collective, so a pretended group of two ranks is enough."""
    distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        weight = nn.Parameter(DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)]))
        weight.grad = gradient = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
        made = torch.optim.AdamW([weight])
        made.step()
        own: dict[str, Any] = {"parameter": weight, "gradient": gradient, "moment": made.state[weight]["exp_avg"]}
        part = own[fault.rpartition("_")[2]].to_local()
        before = part.clone()
        (tmp_path / "rank-1").write_text(fault)
        _obey(tmp_path / "rank-1", made)
        assert int((part != before).sum()) == 1
    finally:
        distributed.destroy_process_group()


def test_a_tensor_that_is_not_contiguous_and_one_without_elements() -> None:
    empty, turned = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(3, 2).t())
    for each in (empty, turned):
        each.grad = torch.ones_like(each)
    FAULTS["nan_in_gradient"](torch.optim.SGD([empty, turned]))
    assert turned.grad is not None
    assert int(turned.grad.isnan().sum()) == 1


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("bit_in_moment", "the optimizer has no moment with an element on this rank"),
        ("deadlock", "the rank has no other rank to talk to"),
        ("other_collective", "the rank has no other rank to talk to"),
        ("spike_by_data", "the number of the next batch is not known"),
    ],
)
def test_a_fault_that_has_nothing_to_strike_says_so_and_does_nothing(
    fault: str, sentence: str, group: None, tmp_path: Path
) -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    made = torch.optim.SGD([parameter])  # it has no moments
    made.step()
    order = tmp_path / "rank-0"
    order.write_text(fault)
    _obey(order, made)
    assert (tmp_path / "rank-0.refused").read_text() == sentence
    assert not order.exists()
    assert not order.with_suffix(".taken").exists()


def test_a_bad_batch_is_bad_each_time_and_no_other(
    optimizer: torch.optim.Optimizer, tmp_path: Path, monkeypatch: Any
) -> None:
    session = SimpleNamespace(fixed_data=False, data_step=5)
    monkeypatch.setattr(injector, "_sessions", [session])
    monkeypatch.setenv(injector.VARIABLE, json.dumps({"folder": str(tmp_path)}))
    FAULTS["spike_by_data"](optimizer)
    first, harmed = parts(optimizer)["parameter"], []
    for session.data_step in (7, 8, 9, 8):
        before = first.clone()
        injector._use(tmp_path / injector._BAD, optimizer)
        harmed.append(not torch.equal(first, before))
    assert harmed == [False, True, False, True]


def test_without_a_session_no_batch_is_bad(optimizer: torch.optim.Optimizer, tmp_path: Path) -> None:
    assert injector._batch() == -1


def test_a_start_fails_as_often_as_ordered(tmp_path: Path) -> None:
    order = tmp_path / f"{STARTS}-0"
    order.write_text("2")
    for _ in range(2):
        with pytest.raises(ImportError, match="a fault of mt-resilient chaos"):
            _start(order)
    _start(order)


def test_what_ends_a_rank_ends_it(optimizer: torch.optim.Optimizer) -> None:
    with pytest.raises(RuntimeError, match="a fault of mt-resilient chaos"):
        FAULTS["raises"](optimizer)
