"""Scales, maxima and float8 weights of Transformer Engine's modules, with the stand-in for it: restored in place, and in a new process
before the first forward pass, where the module has no such tensors yet."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

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
    life = Life(model=model)
    kept = life.snapshot()
    assert {name for name in kept[1] if "transpose" in name} == set()
    model.weight._transpose_invalid = False
    life.restore(kept)
    assert model.weight._transpose_invalid
