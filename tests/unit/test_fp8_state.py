"""Scales, maxima and float8 weights of Transformer Engine's modules, with the stand-in for it: restored in place, and in a new process
before the first forward pass, where the module has no such tensors yet."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mt_resilient.checkpoint.format.tensor_table import Table
from mt_resilient.training.snapshot.replicated_values import beside_tensors
from mt_resilient.training.state.modules import fp8_state
from mt_resilient.training.state.tensors.tensor_subclasses import ordinary

from ..harness import ROOT
from .lives import Life, comes_back


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "fp8" / "standin"))
    from transformer_engine import pytorch

    yield pytorch
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]


@pytest.mark.parametrize("weights_in_fp8", [False, True])
@pytest.mark.parametrize("steps", [0, 4])
def test_scales_and_maxima_decide_the_next_weights_and_come_back(te: Any, steps: int, weights_in_fp8: bool) -> None:
    """What a step makes of the weights depends on the scales of earlier ones."""

    def make() -> Any:
        te.FP8GlobalStateManager.reset()
        torch.manual_seed(0)
        model = te.Linear(8, 2, primary_weights_in_fp8=weights_in_fp8)

        def step(number: int) -> None:
            inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(number)) * (number + 1)
            with te.fp8_autocast(fp8_recipe=te.DelayedScaling(amax_history_len=3)):
                model(inputs).square().sum().backward()
            weight = model.weight.dequantize() if weights_in_fp8 else model.weight.detach()
            model.weight.data.copy_(weight - 1e-3 * model.weight.grad)
            model.weight.grad, model.weight._transpose_invalid = None, False

        def looks() -> Any:
            return (model.weight.dequantize() if weights_in_fp8 else model.weight).tolist()

        return {"model": model}, step, looks

    comes_back(make, steps, 3)


def test_a_transposed_copy_of_a_float8_weight_is_made_anew(te: Any) -> None:
    model = te.Linear(8, 2, primary_weights_in_fp8=True)
    model.weight._transpose, model.weight._transpose_invalid = model.weight._data.t().contiguous(), False
    life = Life(model=model)
    kept = life.snapshot()
    assert {name for name in kept[1] if "transpose" in name} == set()
    life.restore(kept)
    assert model.weight._transpose_invalid


def test_the_columns_of_a_block_scaled_weight_are_made_anew(te: Any) -> None:
    """A step may have dropped them, and a new process has them."""

    def module(by_columns: bool) -> torch.nn.Module:
        made = torch.nn.Module()
        made.weight = torch.nn.Parameter(te.BlockTensor(torch.full((4, 2), by_columns, dtype=torch.uint8)))
        made.weight.update_usage(columnwise_usage=by_columns)
        return made

    kept = Life(model=module(by_columns=False)).snapshot()
    later = module(by_columns=True)
    Life(model=later).restore(kept)
    assert not later.weight._rowwise_data.any()
    assert later.weight._columnwise_data is None
    one = te.BlockTensor(torch.zeros(4, 2), is_2d_scaled=False)  # its columns are rounded by themselves
    assert "weight._columnwise_data" in ordinary({"weight": one})


def test_a_fused_operation_keeps_its_scales_without_a_pickle(te: Any) -> None:
    def make() -> Any:
        operation = te.Operation()
        seen = []

        def step(number: int) -> None:
            with te.fp8_autocast(fp8_recipe=te.DelayedScaling(amax_history_len=3)):
                seen[:] = operation(torch.arange(1.0, 4.0) * 1.3 ** (number + 1)).tolist()

        def looks() -> Any:
            kept = fp8_state.collect(operation)
            return [each.tolist() for each in kept.values()]

        return {"model": operation}, step, looks

    snapshot = comes_back(make, 4, 3)
    assert not any(part.endswith("/state/value") for part in snapshot[1])


def test_histories_of_another_form_begin_anew(te: Any, capfd: pytest.CaptureFixture[str]) -> None:
    def module(tensors: int, old: bool = False) -> Any:
        made = te.Linear(8, 2, primary_weights_in_fp8=True)
        for state in (made.fp8_meta[direction] for direction in te.TYPES):
            state.scale, state.amax_history = torch.full((tensors,), 3.0), torch.full((4, tensors), 5.0)
            if old:
                state.scale_inv = 1 / state.scale
        return made

    for tensors, old, expected in ((2, False, (3.0, 5.0)), (7, False, (1.0, 0.0)), (2, True, (3.0, 5.0))):
        kept = fp8_state.collect(module(2, old))
        later = module(tensors, old)
        for state in (later.fp8_meta[direction] for direction in te.TYPES):
            state.scale.fill_(9.0)
            state.amax_history = torch.full((1024, tensors), 9.0)
        fp8_state.restore(later, kept)
        for state in (later.fp8_meta[direction] for direction in te.TYPES):
            assert (float(state.scale[0]), float(state.amax_history[-1, 0])) == expected
            assert not old or float(state.scale_inv[0]) == float(torch.tensor(1 / 3.0))
        assert ("begin anew" in capfd.readouterr().err) == (expected[0] == 1.0)


@pytest.mark.parametrize("stages", [1, 2])
def test_scales_of_stages_that_give_different_layers_one_name_begin_anew_in_another_layout(
    te: Any, capfd: pytest.CaptureFixture[str], stages: int
) -> None:
    def rank(stage: int) -> Life:
        te.FP8GlobalStateManager.reset()
        torch.manual_seed(stage)
        model = te.Linear(8, 2)
        with te.fp8_autocast():
            model(torch.randn(4, 8)).sum().backward()
        return Life(model=model)

    lives = [rank(number % stages) for number in range(2)]
    (name,) = lives[0].sources
    kept = [(Table.from_json(table), content) for table, content in (life.snapshot() for life in lives)]
    saved: Any = SimpleNamespace(
        snapshot="step-5",
        manifests=[
            SimpleNamespace(
                rank=number,
                table=table,
                fingerprints=[hashlib.sha256(content[piece.name]).hexdigest() for piece in table.pieces],
            )
            for number, (table, content) in enumerate(kept)
        ],
        described=[table.described() for table, _ in kept],
        content=lambda number, piece: np.frombuffer(bytearray(kept[number][1][piece.name]), np.uint8),
    )
    modules: Any = Life(model=te.Linear(8, 2)).sources[name]
    (extra,) = beside_tensors(saved, name, modules)[".extra"].values()
    assert bool(extra) == (stages == 1)
    assert ("begin anew" in capfd.readouterr().err) == (stages == 2)
