"""Faults inside a rank: each changes what it says, once, when it is ordered."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

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
