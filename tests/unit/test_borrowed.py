"""What is one thing in two places of a state stays one: memory of models and optimizers that a value borrows, and objects under two names.

Each test goes back in the same process and in a new one.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mt_resilient.resilience.errors import SnapshotError
from mt_resilient.training.state.sources import sources_of
from mt_resilient.training.state.values.borrowed_memory import Loans

from .kept import Meter, Snapshot
from .lives import Life


class Keeper(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 3)
        self.old: Any = None
        self.register_buffer("mean", torch.arange(4.0))


class Script:
    """A training that holds things beside its model."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.best = Keeper(), dict[str, Any]()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.life = Life(best=self.best, model=self.model, optimizer=self.optimizer)
        self.life.snapshot()

    def step(self) -> None:
        self.model(torch.ones(1, 2)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.mean += 1  # type: ignore[operator]


def tensors(thing: Any) -> list[Any]:
    if isinstance(thing, dict):
        return [each for value in thing.values() for each in tensors(value)]
    return [thing.tolist()] if isinstance(thing, torch.Tensor | np.ndarray) else [thing]


BORROWED: dict[str, Callable[[Script], Any]] = {
    "weights": lambda script: script.model.state_dict(),
    "optimizer": lambda script: script.optimizer.state_dict()["state"],
    "parameter": lambda script: script.model.weight,
    "row": lambda script: script.model.weight.detach()[1:, 0],
    "array": lambda script: script.model.weight.detach().numpy().T[::-1],
    "words": lambda script: script.model.mean.view(torch.int32),  # type: ignore[operator]
}


@pytest.mark.parametrize(
    "what",
    [name if name in ("weights", "optimizer") else pytest.param(name, marks=pytest.mark.variant) for name in BORROWED],
)
def test_what_a_value_borrows_of_models_and_optimizers_follows_them(what: str) -> None:
    script = Script()
    script.step()
    before = script.life.snapshot()
    script.best["w"] = BORROWED[what](script)
    kept = script.life.snapshot()
    script.step()
    wanted = tensors(script.best)
    assert wanted != tensors(BORROWED[what](Script()))
    for one in (script, Script()):
        one.life.restore(kept)
        one.step()
        assert tensors(one.best) == tensors({"w": BORROWED[what](one)}) == wanted
    script.life.restore(before)
    assert script.best == {}


def test_the_state_of_a_parameter_that_a_value_holds_stays_the_optimizers() -> None:
    script = Script()
    script.step()
    script.best["w"] = script.optimizer.state_dict()
    script.life.snapshot()
    kept, fresh = script.life.snapshot(), Script()
    fresh.life.restore(kept)
    assert fresh.best["w"]["state"][0] is fresh.optimizer.state[fresh.model.weight]
    assert kept[1].keys() == {name for name in kept[1] if not name.startswith("best/")}, "kept once"


def test_a_value_of_its_own_is_not_put_where_a_borrowed_one_is() -> None:
    """A copy, which has become a view of the weights meanwhile."""
    script = Script()
    script.step()
    script.best |= {
        "w": copy.deepcopy(script.model.weight.detach()) + 1,
        "o": copy.deepcopy(script.optimizer.state[script.model.weight]),
    }
    script.best["o"]["exp_avg"] += 1
    kept, weights, wanted = script.life.snapshot(), script.model.weight.tolist(), tensors(script.best)
    moments = tensors(script.optimizer.state[script.model.weight])
    script.best |= {"w": script.model.weight.detach(), "o": script.optimizer.state[script.model.weight]}
    script.life.restore(kept)
    assert script.model.weight.tolist() == weights
    assert tensors(script.optimizer.state[script.model.weight]) == moments
    assert tensors(script.best) == wanted


def test_an_attribute_that_is_a_view_of_a_parameter_stays_one() -> None:
    script = Script()
    before = script.life.snapshot()
    script.model.old = script.model.weight.detach()[0]
    kept = script.life.snapshot()
    for one in (script, Script()):
        one.life.restore(kept)
        one.step()
        assert one.model.old.tolist() == one.model.weight[0].tolist()
    script.life.restore(before)
    assert script.model.old is None


def shared(first: Any, second: Any) -> tuple[dict[str, Any], dict[str, Any], Any]:
    return first, second, sources_of({"replay": first, "best": second})


def test_an_object_under_two_names_of_the_session_stays_one() -> None:
    replay, best, sources = shared({}, {})
    meter, tensor = Meter(), torch.zeros(3)
    replay |= {"m": meter, "t": tensor, "l": [1]}
    best |= {"top": [meter], "t": tensor, "l": replay["l"]}
    snapshot = Snapshot(sources)
    snapshot.prove()
    for one, other, of in (replay, best, sources), shared({}, {}):
        one.pop("l", None)
        snapshot.restore(of)
        assert other["top"][0] is one["m"]
        assert other["t"] is one["t"]
        assert other["l"] is one["l"]
        assert one["l"] == [1]
    assert replay["m"] is meter


def test_objects_under_two_names_that_have_become_one_are_two_again() -> None:
    replay, best, sources = shared({"l": [1], "t": torch.zeros(2)}, {"l": [2], "t": torch.ones(2)})
    snapshot = Snapshot(sources)
    best |= replay
    snapshot.restore(sources)
    assert (replay["l"], best["l"], replay["t"].tolist(), best["t"].tolist()) == ([1], [2], [0, 0], [1, 1])


def test_nothing_is_held_on_to_between_snapshots() -> None:
    replay, best, sources = shared({"a": [1]}, {"b": [2]})
    Snapshot(sources)
    replay["a"] = best["b"] = None
    replay["a"] = [3]
    best["b"] = [4]
    snapshot = Snapshot(sources)
    snapshot.restore(sources)
    assert (replay, best) == ({"a": [3]}, {"b": [4]})
    best["lock"] = lambda: 1
    with pytest.raises(SnapshotError):
        Snapshot(sources)
    del best["lock"]
    best["b"] = replay["a"]
    Snapshot(sources).restore(sources)
    assert best["b"] is replay["a"]


class Trained(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 1)
        self.shift = torch.zeros(1, requires_grad=True)


@pytest.mark.parametrize("fresh", [False, True])
def test_a_plain_tensor_that_is_trained_by_hand_comes_back(fresh: bool) -> None:
    model = Trained()
    life = Life(model=model)
    life.snapshot()
    model.shift.data += 2
    kept = life.snapshot()
    model.shift.data += 2
    target = Trained() if fresh else model
    (Life(model=target) if fresh else life).restore(kept)
    assert (target.shift.tolist(), target.shift.requires_grad, target.shift.is_leaf) == ([2], True, True)


def test_an_object_of_a_file_beside_the_script_belongs_to_its_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside_the_script.py").write_text("class Ema:\n    value = 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    ema = __import__("beside_the_script").Ema
    try:
        model = nn.Sequential(Keeper())
        model[0].old = ema()
        life = Life(model=model)
        life.snapshot()
        model[0].old.value = 7
        kept = life.snapshot()
        model[0].old.value = 8
        life.restore(kept)
        assert model[0].old.value == 7
    finally:
        del sys.modules["beside_the_script"]


def test_an_attribute_that_cannot_be_kept_any_more_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    script = Script()
    script.model.old = [1]
    script.life.snapshot()
    script.model.old.append(lambda: 1)
    for _ in range(2):
        assert b"/old" not in script.life.snapshot()[0]
    said = capsys.readouterr().err
    assert said.count("model.old is not kept any more") == 1


def test_what_a_script_puts_on_an_optimizer_of_torchs_comes_back(capsys: pytest.CaptureFixture[str]) -> None:
    script = Script()
    script.optimizer.global_step, script.optimizer.told = 0, []  # type: ignore[attr-defined]
    script.optimizer.generator = (each for each in "ab")  # type: ignore[attr-defined]
    script.life.snapshot()
    script.optimizer.global_step = 5  # type: ignore[attr-defined]
    script.optimizer.told.append(5)  # type: ignore[attr-defined]
    kept = script.life.snapshot()
    script.optimizer.global_step, script.optimizer.late = 6, 1  # type: ignore[attr-defined]
    script.life.snapshot()
    for one in (script, Script()):
        one.life.restore(kept)
        assert (one.optimizer.global_step, one.optimizer.told) == (5, [5])  # type: ignore[attr-defined]
        assert not hasattr(one.optimizer, "late")
    assert capsys.readouterr().err.count("optimizer.generator is not kept") == 1


@pytest.mark.parametrize("kind", [nn.ParameterList, pytest.param(nn.ParameterDict, marks=pytest.mark.variant)])
def test_a_list_of_parameters_that_has_grown_goes_back(kind: Any) -> None:
    model = kind([torch.ones(2)] if kind is nn.ParameterList else {"0": torch.ones(2)})
    life = Life(model=model)
    kept, objects = life.snapshot(), life.objects()
    if kind is nn.ParameterList:
        model.append(torch.zeros(2))
    else:
        model["1"] = torch.zeros(2)
    life.snapshot()
    life.restore(kept, objects)
    assert len(model) == 1
    assert [each.tolist() for each in (model.values() if kind is nn.ParameterDict else model)] == [[1, 1]]


class Gradual(torch.optim.lr_scheduler.LRScheduler):
    """Goes on with another one."""

    def __init__(self, optimizer: Any, after: Any) -> None:
        self.after = after
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return list(self.base_lrs)


def test_a_scheduler_that_holds_another_one() -> None:
    def made() -> tuple[Gradual, Life]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        inner = Gradual(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3))
        return (schedule := Gradual(optimizer, inner)), Life(optimizer=optimizer, schedule=schedule)

    schedule, life = made()
    assert [*life.sources] == ["optimizer", "schedule", "schedule.after", "schedule.after.after"]
    schedule.after.after.last_epoch = 7
    kept = life.snapshot()
    another, fresh = made()
    fresh.restore(kept)
    assert another.after.after.last_epoch == 7


def test_nobody_is_asked_about_tensors_that_are_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    script, asked = Script(), list[str]()
    mean = script.best["mean"] = torch.zeros(3)
    script.life.snapshot()
    look = Loans._look
    monkeypatch.setattr(Loans, "_look", lambda each: asked.append("") or look(each))
    for _ in range(3):
        mean += 1
        script.life.snapshot()
    assert not asked
    script.model.mean.data = mean  # type: ignore[union-attr]
    script.life.snapshot()
    assert asked
