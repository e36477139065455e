"""Things of people's scripts that look like something else: each comes back as it was, or is refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from mt_resilient.resilience.errors import SnapshotError

from .kept import Snapshot, of
from .lives import Life, Made, comes_back


class Scheduled:
    """With the rate of Noam, as in many repositories: it looks like a wrapper of Megatron's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.count = optimizer, 0

    param_groups = property(lambda self: self.optimizer.param_groups)

    def step(self) -> None:
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.count
        self.optimizer.step()


class Declaring(Scheduled):
    def state_dict(self) -> Any:
        return {"optimizer": self.optimizer.state_dict(), "count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.count = state["count"]


@pytest.mark.parametrize("kind", [Scheduled, Declaring])
def test_an_object_around_an_optimizer_keeps_what_is_its_own(kind: Any) -> None:
    def made() -> Made:
        torch.manual_seed(1)
        model = nn.Linear(2, 2)
        optimizer = kind(torch.optim.Adam(model.parameters()))

        def step(_: int) -> None:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.optimizer.zero_grad()

        def looks() -> Any:
            return optimizer.count, [each.tolist() for each in model.parameters()]

        return {"model": model, "optimizer": optimizer}, step, looks

    comes_back(made, 1, 1, begun=False)


class Collector:
    """Its methods are called as those of a source are, and mean something else."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def collect(self) -> dict[str, int]:
        self.rows.append(len(self.rows))
        return {"last": self.rows[-1]}

    def restore(self, path: str) -> None:
        raise AssertionError(path)


class Precise(torch.optim.Optimizer):
    """States more precise than the parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["mean"] = state.get("mean", torch.zeros_like(parameter, dtype=torch.float64)) * 0.9
                state["mean"] += parameter.grad.double() / 3
                parameter -= (group["lr"] * state["mean"]).to(parameter.dtype)


class Sharing(Declaring):
    """As Apex's LARC."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.count = optimizer, 0
        self.groups, self.states = optimizer.param_groups, optimizer.state

    def step(self) -> None:
        super().step()
        for group in self.groups:
            group["lr"] *= 0.5


class Loading(Sharing):
    """As Lookahead."""

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.groups, self.states = self.optimizer.param_groups, self.optimizer.state


class Training:
    """A trainer as in every second repository."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.models, self.optimizers, self.count = {"net": model}, [optimizer], 0

    def state_dict(self) -> Any:
        models = {name: model.state_dict() for name, model in self.models.items()}
        return {"models": models, "optimizer": self.optimizers[0].state_dict(), "count": self.count}

    def load_state_dict(self, state: Any) -> None:
        for name, kept in state["models"].items():
            self.models[name].load_state_dict(kept)
        self.optimizers[0].load_state_dict(state["optimizer"])
        self.count = state["count"]


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(2, 2), 0

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(given) * (1 + 0.01 * self.calls)  # type: ignore[no-any-return]


Counts.__module__ = "people"


@pytest.mark.parametrize("kind", [Declaring, Sharing, Loading, Training])
@pytest.mark.parametrize("given", ["alone", "with its parts", "behind its parts"])
def test_what_its_state_dict_leaves_out_or_turns_into_another_dtype_comes_back(kind: Any, given: str) -> None:
    def made() -> Made:
        torch.manual_seed(1)
        model = Counts()
        optimizer = Precise(model.parameters())
        thing = kind(model, optimizer) if kind is Training else kind(optimizer)
        alone = given == "alone" and kind is Training
        parts = {} if alone else {"model": model, "optimizer": optimizer} if given != "alone" else {"model": model}

        def step(_: int) -> None:
            optimizer.zero_grad()
            model(torch.tensor([[1.0, 0.3]])).square().sum().backward()
            (optimizer if kind is Training else thing).step()
            thing.count += 1

        def looks() -> Any:
            if isinstance(thing, Sharing):
                assert thing.groups is optimizer.param_groups
                assert thing.states is optimizer.state
            means = [optimizer.state[each]["mean"] for each in model.parameters() if optimizer.state]
            return repr([(each.dtype, each.tolist()) for each in (*model.parameters(), *means)])

        return ({**parts, "thing": thing} if given == "behind its parts" else {"thing": thing, **parts}), step, looks

    comes_back(made, 3, 3)


class Warmed(Scheduled):
    """Its state is its optimizer's alone, as in many repositories. It learns from that whether it goes on from a checkpoint."""

    resumed = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.fresh, self.place = True, "here"

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)
        self.fresh = False


Warmed.__module__ = "__main__"


@pytest.mark.parametrize("again", [True, False], ids=["a restart", "in place"])
@pytest.mark.parametrize("steps", [0, 2])
def test_numbers_that_a_state_dict_leaves_out_come_back_and_what_the_load_sets_stays(again: bool, steps: int) -> None:
    def made(place: str) -> tuple[Any, Life]:
        thing = Warmed(torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1))
        thing.place = place
        return thing, Life(thing=thing)

    thing, life = made("here")
    life.snapshot()  # as before the first step
    for _ in range(steps):
        thing.step()
    kept = life.snapshot()
    thing.step()
    thing.seen = 7
    if again:
        thing, life = made("there")
    life.restore(kept)
    assert (thing.count, thing.fresh) == (steps, False)
    assert thing.place == ("there" if again else "here"), "what has not changed since the start is the script's"


def test_methods_of_a_script_with_the_names_of_ours_are_not_called() -> None:
    collector = Collector()
    collector.collect()
    snapshot = Snapshot(of(collector))
    assert collector.rows == [0]
    collector.collect()
    snapshot.restore()
    assert collector.rows == [0]


class Spool:
    """Deletes its file with itself."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def __del__(self) -> None:
        self.path.unlink()


def test_the_trial_of_a_snapshot_deletes_nothing_that_the_live_object_has(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    snapshot = Snapshot(of({"spool": spool}))
    snapshot.prove()
    assert spool.path.exists()


class Listed:
    """Its `state_dict` is no dict."""

    def __init__(self) -> None:
        self.found: Any = [1, torch.ones(2)]

    def state_dict(self) -> Any:
        return self.found

    def load_state_dict(self, state: Any) -> None:
        self.found = state


@pytest.mark.parametrize("state", [[1, torch.ones(2)], torch.ones(3), 7, (1, "a")])
def test_a_state_dict_may_be_anything(state: Any) -> None:
    listed, fresh = Listed(), Listed()
    listed.found = state
    snapshot = Snapshot(of(listed))
    snapshot.prove()
    snapshot.restore(of(fresh))
    assert str(fresh.found) == str(state)
    assert type(fresh.found) is type(state)


def test_an_array_that_cannot_come_back_is_refused_by_name_whenever_it_comes() -> None:
    values: dict[str, Any] = {"scale": None}
    sources = of(values)
    Snapshot(sources)
    values["scale"] = np.ones(4, ml_dtypes.bfloat16)
    with pytest.raises(SnapshotError, match=r"state\['scale'\] can't be saved: it is an array of bfloat16"):
        Snapshot(sources)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(2, 2)


def test_a_list_of_models_may_grow_and_change() -> None:
    pool: list[Any] = [network(), network()]
    life = Life(pool=pool)
    life.snapshot()
    pool[1] = copy.deepcopy(pool[0])
    pool[1].weight.data.fill_(3)
    kept, objects, second = life.snapshot(), life.objects(), pool[1]
    assert life.bound == ""
    pool.append(network())
    life.snapshot()
    assert "the list of models has 3 members and had 2" in life.bound
    pool[1].weight.data.fill_(4)
    life.restore(kept, objects)
    assert len(pool) == 2
    assert pool[1] is second
    assert float(pool[1].weight.detach().sum()) == 12.0
    fresh: list[Any] = [network(), network()]
    Life(pool=fresh).restore(kept)
    assert float(fresh[1].weight.detach().sum()) == 12.0
