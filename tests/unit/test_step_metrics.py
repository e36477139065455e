"""Steps with NaN or Inf that a loss scaler or the script itself skips are no fault, unless a later step uses their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from mt_resilient.training.boundary.step_metrics import Figures, Skips
from mt_resilient.training.state.modules.module_source import Modules
from mt_resilient.training.state.optimizers.accumulated_gradients import Accumulation, Halfway
from mt_resilient.training.state.optimizers.optimizers import Optimizers

FINE, BAD = Figures(1.0, 2.0), Figures(1.0, math.inf)


@pytest.mark.parametrize(
    ("steps", "judged"),
    [
        ("..u", "--3"),  # u: Inf, and the optimizer steps all the same
        ("sss..", "-----"),  # s: Inf, and the script skips the step
        (".su", "--2"),
        ("su.", "-1-"),
        (".s..u", "----5"),  # the scaler's skip at step 2 is over
        ("aSaau", "----2"),  # a, S: steps without an optimizer's step, that add to the gradients; S with Inf
        ("aSa.u", "----2"),
        ("aSa..u", "-----6"),
        ("s" * 65, "-" * 64 + "1"),
        ("sa" * 65, "-" * 130),  # not in a row; torch's hook does not tell when this optimizer steps
        ("s" + "a" * 64 + "u", [*"-" * 65, "66"]),
    ],
)
def test_inf_is_judged_once_an_optimizer_steps_with_it_and_its_onset_is_the_first_such_step(
    steps: str, judged: str | list[str]
) -> None:
    skips = Skips()
    for number, (each, expected) in enumerate(zip(steps, judged, strict=True), start=1):
        figures = BAD if each in "usS" else FINE
        said = skips.look(number, figures, each in "u.", lambda each=each: each != "u")  # type: ignore[misc]
        assert said.finite is (expected == "-"), number
        assert said.finite or said.began == int(expected)


def test_what_was_skipped_before_a_rewind_is_forgotten() -> None:
    skips = Skips()
    skips.look(5, BAD, False, lambda: True)
    assert skips.look(3, BAD, True, lambda: False).began == 3


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters)


def fused(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, fused=True)


@pytest.mark.parametrize("overflows", [False, True])
@pytest.mark.parametrize("second", [False, True], ids=["one", "two"])
@pytest.mark.parametrize("make", [adam, fused])
def test_a_step_that_a_grad_scaler_skips_is_known(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], second: bool, overflows: bool
) -> None:
    first, other = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizers = [make([*model.parameters()]) for model in (first, other)[: 1 + second]]
    gradients = Accumulation([Modules([first, other])], [*map(Optimizers, optimizers)], [], print)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(first(torch.full((1, 2), math.inf if overflows else 1.0)).sum()).backward()
    scaler.scale(other(torch.ones(1, 2)).sum()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    gradients._hook.remove()
    gradients.crossed()
    assert gradients.held_back() is overflows


class Wrapper(torch.optim.Optimizer):
    """As accelerate's, Lightning's and torch's PostLocalSGDOptimizer: torch's hook tells nothing of its steps."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state, self.defaults = inner, inner.param_groups, inner.state, {}

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.inner.step()


class Unhooked(Wrapper):
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter -= 0.1 * parameter.grad


def as_it_is(inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return inner


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("idle", [False, True], ids=["alone", "beside one that has not stepped yet"])
@pytest.mark.parametrize("wrapped", [as_it_is, Wrapper, Unhooked])
def test_a_step_that_made_a_parameter_nan_is_never_held_back(
    wrapped: Callable[[torch.optim.Optimizer], torch.optim.Optimizer], idle: bool, stepped: bool
) -> None:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizers = [optimizer, *[torch.optim.Adam(other.parameters())][:idle]]
    gradients = Accumulation([Modules([model, other])], [*map(Optimizers, optimizers)], [], print)
    model(torch.full((1, 2), math.nan)).sum().backward()
    if stepped:
        optimizer.step()
    gradients._hook.remove()
    gradients.crossed()
    assert gradients.held_back() is not stepped


def test_a_parameter_of_no_module_that_became_nan_is_never_held_back() -> None:
    bare, other = nn.Parameter(torch.ones(2)), nn.Linear(2, 1)
    optimizer, idle = torch.optim.SGD([bare], lr=0.1), torch.optim.SGD(other.parameters())
    sources = [Optimizers(each) for each in (optimizer, idle)]
    for source in sources:
        source.collect()
    gradients = Accumulation([], sources, [], print)
    (bare * math.nan).sum().backward()
    optimizer.step()
    gradients._hook.remove()
    gradients.crossed()
    assert not gradients.held_back()


@pytest.mark.parametrize("sparse", [False, True])
def test_no_snapshot_holds_a_gradient_with_nan_that_a_later_step_may_use(sparse: bool) -> None:
    model = nn.Embedding(2, 1, sparse=sparse)
    gradients = Accumulation([Modules([model])], [Optimizers(torch.optim.SGD(model.parameters()))], [], print)
    gradients._hook.remove()
    (model(torch.tensor([0])) * math.nan).sum().backward()
    gradients.crossed()
    gradients.collect()  # nobody has said that there is NaN
    gradients.doubtful = True
    with pytest.raises(Halfway, match="the gradients contain NaN or Inf"):
        gradients.collect()
    gradients.ends = True
    gradients.collect()
    model.weight.grad, gradients.ends = None, False
    gradients.collect()


def test_a_parameter_that_the_script_has_set_to_nan_on_purpose_says_nothing() -> None:
    model = nn.Embedding(2, 2)
    with torch.no_grad():
        model.weight[0] = math.nan
    source = Modules([model])
    source.excuse()
    optimizer = Optimizers(torch.optim.SGD(model.parameters()))
    gradients = Accumulation([source], [optimizer], [], print)
    gradients._hook.remove()
    assert gradients.held_back()
