"""Which optimizers are known to make their steps wait for copies from a device."""

from typing import Any
from weakref import WeakSet

import pytest
import torch
from accelerate import Accelerator
from torch.optim import SGD, Optimizer

from mt_resilient.training.snapshot.device_copy import Offload
from mt_resilient.training.state.optimizers.optimizers import Optimizers


class Wrapper(Optimizer):
    """Shows the groups and the state of another optimizer, as Lightning Fabric's and PostLocalSGDOptimizer do. No hook runs for its own
    step."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    param_groups = property(lambda self: self.inner.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.inner.state)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:
        self.inner.step()


@pytest.mark.parametrize(
    "wrap",
    [lambda inner: inner, Wrapper, lambda inner: Accelerator(cpu=True).prepare_optimizer(inner)],
    ids=["itself", "wrapper", "accelerate"],
)
def test_an_optimizer_waits_once_it_has_stepped_and_until_its_step_is_captured(wrap: Any) -> None:
    inner = SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer = wrap(inner)
    source, captures = Optimizers(optimizer), False
    offload: Any = Offload.__new__(Offload)
    offload.stepped, offload.captured, offload._under_way = WeakSet(), WeakSet(), []
    offload._captures = lambda: captures
    inner.register_step_pre_hook(offload._before_update)

    assert not source.wait(offload.stepped, offload.captured)
    optimizer.step()
    assert source.wait(offload.stepped, offload.captured)
    captures = True
    optimizer.step()
    captures = False
    optimizer.step()
    assert not source.wait(offload.stepped, offload.captured)


def test_a_source_without_optimizers_on_this_rank_waits_for_nothing() -> None:
    source: Any = Optimizers.__new__(Optimizers)
    source.wrappers = []
    assert not source.wait([1], [])
