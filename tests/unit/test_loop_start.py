"""What a rank says after its first step of what no snapshot holds."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mt_resilient.training.boundary.loop_start import length, tell_of_what_is_missing
from mt_resilient.training.state.sources import sources_of

SAID = "the Session was not given the optimizer Adam, which has stepped parameters of its model"


class Holder:
    """An object of the script's that saves its optimizer by itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


def stepped(model: nn.Module) -> torch.optim.Adam:
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def said(capsys: pytest.CaptureFixture[str], resume_step: int = -1, **given: Any) -> str:
    at: Any = SimpleNamespace(rank=0, handoff=SimpleNamespace(resume_step=resume_step))
    tell_of_what_is_missing(at, sources_of(given).values())
    return capsys.readouterr().err


def test_an_optimizer_that_the_session_was_not_given_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 2)
    optimizer = stepped(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    assert said(capsys, model=model, schedule=schedule).count(SAID) == 1
    assert said(capsys, resume_step=7, model=model) == "", "a restart is not held up by the look"


def test_an_optimizer_that_something_given_holds_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 2)
    optimizer = stepped(model)
    assert said(capsys, model=model, optimizer=optimizer) == ""
    assert said(capsys, model=model, all={"of": [optimizer]}) == ""
    assert said(capsys, model=model, holder=Holder(optimizer)) == ""


def test_optimizers_of_other_models_and_those_that_have_not_stepped_are_not_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    idle, foreign = torch.optim.Adam(model.parameters()), stepped(other)
    assert said(capsys, model=model) == ""
    del idle, foreign


def test_a_scheduler_that_the_session_was_not_given_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    told = "the Session was not given the scheduler SequentialLR of its optimizer"
    model, schedulers = nn.Linear(2, 2), torch.optim.lr_scheduler
    optimizer, other = stepped(model), stepped(nn.Linear(2, 2))
    both = [schedulers.StepLR(optimizer, 2), schedulers.ConstantLR(optimizer)]
    given = schedulers.SequentialLR(optimizer, both, [3])
    of_another = schedulers.StepLR(other, 2)
    assert said(capsys, model=model, optimizer=optimizer).count(told) == 1
    assert said(capsys, model=model, optimizer=optimizer, given=given) == ""
    assert said(capsys, model=model, optimizer=optimizer, all={"of": [given]}) == ""
    assert said(capsys, model=model, all={"of": {"it": optimizer}}, given=given) == ""
    assert said(capsys, model=model, holder=Holder(optimizer)) == "", "it may save the scheduler, too"
    del of_another


def test_a_scheduler_without_an_optimizer_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    class Bare(torch.optim.lr_scheduler.LRScheduler):
        def __init__(self) -> None:
            """As people write it who set the rates themselves."""

    bare, model = Bare(), nn.Linear(2, 2)
    assert said(capsys, model=model, optimizer=stepped(model)) == ""
    del bare


@pytest.mark.parametrize(
    ("agents", "now", "made", "said"),
    [
        (("a", "b"), 3, 5, "the script asks for 3 epochs in all. Before the recovery it asked for 5"),
        (("c",), 3, 3, "the script asks for 3 epochs in all. Before, it asked for 5. Training now ends after 3"),
        (("a",), 6, 6, ""),
        (("a",), None, None, ""),
    ],
)
def test_how_long_a_loop_is(
    agents: tuple[str, ...], now: int | None, made: int | None, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    at: Any = SimpleNamespace(rank=0, handoff=SimpleNamespace(resume_step=7, agents=agents))
    course: Any = SimpleNamespace(asked={}, asked_before={"agents": ["a"], "steps": None, "epochs": 5})
    assert length(at, course, {"steps": None, "epochs": now}) == {"steps": None, "epochs": made}
    assert course.asked == {"agents": [*agents], "steps": None, "epochs": made}
    err = capfd.readouterr().err
    assert said in err if said else err == ""
