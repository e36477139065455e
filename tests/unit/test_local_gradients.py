"""The norm of a rank's own gradient is noted whatever the gradient is made of."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mt_resilient.training.boundary.local_gradients import OwnGradients


def one(dtype: torch.dtype) -> nn.Module:
    made = nn.Module()
    made.weight = nn.Parameter(torch.ones(4, dtype=dtype))
    made.index = nn.Parameter(torch.ones(4, dtype=torch.int32), requires_grad=False)
    return made


def sparse() -> nn.Module:
    return nn.Embedding(4, 1, sparse=True)


MADE: dict[str, tuple[Callable[[], nn.Module], float]] = {
    **{str(d): (lambda d=d: one(d), 6.0) for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16)},
    "complex": (lambda: one(torch.complex64), 6.0),
    "double complex": (lambda: one(torch.complex128), 6.0),
    "sparse": (sparse, 0.0),
}


@pytest.mark.parametrize("what", MADE)
def test_the_norm_of_any_kind_of_gradient_is_noted(what: str) -> None:
    make, expected = MADE[what]
    model = make()
    own = OwnGradients([model], noted=True)
    for step in range(1, 11):
        model.zero_grad()
        if what == "sparse":
            model(torch.tensor([1, 2])).sum().backward()
        else:
            (3 * (model.weight * model.weight.conj()).real.sum() / 2 * (2 if step == 10 else 1)).backward()
        own.stepped(step)
    assert own.times_usual(10) == (2.0 if expected else 0.0)
    assert math.isfinite(own.times_usual(9))


@pytest.mark.parametrize("bad_pass", [0, 1])
def test_a_gradient_that_is_reduced_after_each_backward_pass_still_shows_whose_it_was(bad_pass: int) -> None:
    """DistributedDataParallel without `no_sync`: after each pass, each rank has the mean of both."""
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    owns = [OwnGradients([model], noted=True) for model in models]
    for step in range(1, 11):
        for model in models:
            model.zero_grad()
        for number in range(2):
            for rank, model in enumerate(models):
                model(torch.full((1, 1), 1000.0 if (step, number, rank) == (10, bad_pass, 1) else 1.0)).sum().backward()
            for model, mean in zip(models, [sum(m.weight.grad for m in models) / 2] * 2, strict=True):
                model.weight.grad = mean.clone()
        for own in owns:
            own.stepped(step)
    good, bad = ([own.times_usual(10, first=first) for first in (True, False)] for own in owns)
    assert max(one / max(1.0, other) for one, other in zip(bad, good, strict=True)) > 100


class Group:
    """As Megatron's groups of buckets."""

    def __init__(self, checks: bool) -> None:
        self.ddp_config = SimpleNamespace(check_for_nan_in_grad=checks, check_for_large_grads=True)
        self.buckets = [SimpleNamespace(grad_data=torch.ones(4))]
        self.checked: list[tuple[bool, ...]] = []

    def check_grads(self, check_for_nan_or_inf: bool, check_for_large: bool) -> None:
        self.checked.append((check_for_nan_or_inf, check_for_large))

    def reduce(self) -> None:
        config = self.ddp_config
        if config.check_for_nan_in_grad or config.check_for_large_grads:
            self.check_grads(
                check_for_nan_or_inf=config.check_for_nan_in_grad, check_for_large=config.check_for_large_grads
            )


class OldGroup:
    """As up to Megatron 0.11, where the check has no arguments."""

    __init__ = Group.__init__

    def check_for_nan_in_grad(self) -> None:
        self.checked.append(())

    def reduce(self) -> None:
        if self.ddp_config.check_for_nan_in_grad:
            self.check_for_nan_in_grad()


@pytest.mark.parametrize(
    ("kind", "checks", "observes", "expected"),
    [
        (Group, True, True, [(True, True)]),
        (Group, False, True, [(False, True)]),
        (Group, True, False, [(False, True)]),
        (OldGroup, True, True, [()]),
        (OldGroup, False, True, []),
        (OldGroup, True, False, []),
    ],
)
def test_megatron_s_own_check_stays_with_observe_only(kind: Any, checks: bool, observes: bool, expected: Any) -> None:
    group, chunk = kind(checks), nn.Module()
    chunk.bucket_groups = [group]
    own = OwnGradients([chunk], noted=True, observes=observes)
    for step in range(1, 11):
        group.buckets[0].grad_data.fill_(100.0 if step == 10 else 1.0)
        group.reduce()
        own.stepped(step)
    assert group.checked == expected * 10
    assert own.times_usual(10) == (0.0 if (kind, checks) == (OldGroup, False) else 100.0)
    assert group.ddp_config.check_for_nan_in_grad is checks


@pytest.mark.parametrize("observes", [True, False])
def test_alone_megatron_s_check_is_called_with_observe_only(observes: bool) -> None:
    group, chunk = Group(True), nn.Module()
    chunk.bucket_groups = [group]
    OwnGradients([chunk], noted=False, observes=observes)
    group.reduce()
    assert group.checked == [(observes, True)]
