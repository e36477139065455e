"""The norm of a rank's own gradient is noted whatever the gradient is made of."""

import math
from collections.abc import Callable

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
