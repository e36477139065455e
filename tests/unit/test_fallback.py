"""Which steps are computed with care, and that nothing is left of it behind them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mt_resilient.resilience.errors import UsageError
from mt_resilient.resilience.inprocess.fallback import RescuePolicy, careful
from mt_resilient.resilience.model.cause import Kind
from mt_resilient.resilience.model.data_windows import Window
from mt_resilient.resilience.model.rewind import Remedy, Turn
from mt_resilient.resilience.model.types import Step
from mt_resilient.training.boundary.fallback import Rescue
from mt_resilient.training.state.sources import source_of


def turn(remedy: Remedy) -> Turn:
    return Turn(kind=Kind.LOSS_SPIKE, onset=Step(50), to=Step(40), remedy=remedy, window=Window(45, 55))


def test_a_rescue_lasts_from_the_restored_step_until_as_many_steps_after_the_onset_as_batches_are_skipped() -> None:
    assert [step for step in range(100) if careful(step, [turn(Remedy.RESCUE)])] == list(range(40, 60))
    assert not any(careful(step, [turn(Remedy.SKIP)]) for step in range(100))


@pytest.mark.parametrize("lr_scale", [0.0, -1.0, 1.5])
def test_a_learning_rate_scale_outside_of_0_to_1_is_refused(lr_scale: float) -> None:
    with pytest.raises(UsageError, match=r"rescue\.lr_scale"):
        RescuePolicy(lr_scale=lr_scale)


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
def test_the_learning_rate_is_lowered_for_the_optimizers_step_alone(lr: float | torch.Tensor) -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=lr)
    rescue = Rescue(RescuePolicy(lr_scale=0.5), [source_of("optimizer", optimizer)])
    moved = []
    for on in (False, True, False):
        rescue.turn(on)
        before = parameter.item()
        parameter.grad = torch.ones(1)
        optimizer.step()
        moved.append(before - parameter.item())
        assert optimizer.param_groups[0]["lr"] is lr
    assert moved == pytest.approx([0.1, 0.05, 0.1])


def test_fp8_is_taken_out_of_megatrons_configuration_and_put_back() -> None:
    """Which `get_fp8_context` asks at each forward pass; without Transformer Engine no more than this can be seen on a CPU."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    shared = SimpleNamespace(fp8="hybrid")
    for layer in model:
        layer.config = shared
    rescue = Rescue(RescuePolicy(precision=True), [source_of("model", model)])
    rescue.check()
    seen = []
    for on in (True, True, False):
        rescue.turn(on)
        seen.append(shared.fp8)
    assert seen == [None, None, "hybrid"]


def test_a_rescue_that_cannot_be_carried_out_is_refused() -> None:
    plain = [source_of("model", nn.Linear(1, 1))]
    with pytest.raises(UsageError, match="given no optimizer"):
        Rescue(RescuePolicy(lr_scale=0.5), plain)
    rescue = Rescue(RescuePolicy(precision=True), plain)
    with pytest.raises(UsageError, match=r"no Megatron model with config\.fp8"):
        rescue.check()
    assert not rescue.asked
    rescue.check()  # the loop does it by itself
    graphs = nn.Linear(1, 1)
    graphs.config = SimpleNamespace(fp8="e4m3", enable_cuda_graph=True)
    with pytest.raises(UsageError, match="CUDA graphs"):
        Rescue(RescuePolicy(precision=True), [source_of("model", graphs)])
