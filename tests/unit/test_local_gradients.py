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
