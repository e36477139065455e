"""Objects of scripts whose `state_dict` tells less than they have: after a restart and after a rewind in place they go on as before, or the
rank says what their `load_state_dict` has made otherwise."""

from __future__ import annotations

import collections
import copy
import itertools
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from .lives import Life, Made, comes_back
from .test_things_of_scripts import Precise


def of_a_script(kind: Any) -> Any:
    kind.__module__ = "__main__"
    setattr(sys.modules["__main__"], kind.__name__, kind)  # where a restart finds it
    return kind


@of_a_script
class Meter:
    def __init__(self) -> None:
        self.count, self.last = 0, collections.deque([0.0], maxlen=3)


class Stepping:
    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> None:
        self.steps += 1

    def state_dict(self) -> Any:
        return {"steps": self.steps}

    def load_state_dict(self, state: Any) -> None:
        self.steps = state["steps"]

    def looks(self) -> Any:
        return self.steps


@of_a_script
class Containers(Stepping):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[float] = []
        self.best: dict[str, Any] = {"at": None}
        self.mean, self.rows, self.pair = torch.zeros(2), np.zeros(2), (0, 0)
        self.meter, self.names, self.turn = Meter(), SimpleNamespace(n=0), 1j
        self.fixed = self.history

    def step(self) -> None:
        super().step()
        self.history.append(self.steps / 3)
        self.best["at"] = self.steps
        self.mean += 1
        self.rows += 2
        self.pair = self.pair[1], self.steps
        self.meter.count += 1
        self.meter.last.append(self.steps)
        self.names.n += 1
        self.turn *= 1j

    def looks(self) -> Any:
        assert self.fixed is self.history
        held = self.history, self.best, self.mean.tolist(), self.rows.tolist(), self.pair, self.names, self.turn
        return repr((held, self.meter.count, self.meter.last))


@of_a_script
class Drawing(Stepping):
    """A sampler that tells its place alone."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)
        self.order = torch.randperm(5, generator=self.generator)

    def step(self) -> None:
        super().step()
        if self.steps % 5 == 0:
            self.order = torch.randperm(5, generator=self.generator)

    def looks(self) -> Any:
        return self.order.tolist()


@of_a_script
class Slotted:
    __slots__ = ("bad", "steps")

    def __init__(self) -> None:
        self.steps = self.bad = 0

    step = Stepping.step
    state_dict, load_state_dict = Stepping.state_dict, Stepping.load_state_dict

    def looks(self) -> Any:
        self.bad += self.steps
        return self.bad


@of_a_script
class Lazy(Stepping):
    def step(self) -> None:
        super().step()
        self.calls = getattr(self, "calls", 0) + 1

    def looks(self) -> Any:
        return getattr(self, "calls", 0)


@of_a_script
class Resetting(Stepping):
    def __init__(self) -> None:
        super().__init__()
        self.bad = 0

    def step(self) -> None:
        super().step()
        self.bad += 1

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.bad = 0

    def looks(self) -> Any:
        return self.bad


@of_a_script
class Forgetting(Resetting):
    def state_dict(self) -> Any:
        return {"steps": self.steps, "bad": self.bad}

    def load_state_dict(self, state: Any) -> None:
        self.steps = state["steps"]


class Cell:
    __slots__ = ("n", "other")

    def __init__(self) -> None:
        self.n = 0


@of_a_script
class Partly(Stepping):
    """Its load sets parts of what it holds."""

    def __init__(self) -> None:
        self.ring: dict[str, Any] = {"at": 0, "rows": np.zeros(5), "gone": 1}
        self.inner = SimpleNamespace(step=0, best=0.0, seen=[0])
        self.pair = [torch.zeros(2), torch.zeros(2)]
        self.cells, self.numbers = [Cell()], itertools.count()

    def step(self) -> None:
        self.ring["rows"][self.ring["at"] % 5] = self.ring["at"]
        self.ring["at"] += 1
        self.ring.pop("gone", None)
        self.ring["new"] = self.ring.get("new", 0) + 1
        self.inner.step += 1
        self.inner.best += 0.5
        self.inner.seen.append(self.inner.step)
        self.pair[0].add_(1)
        self.pair[1].add_(2)
        self.cells[0].n += 1
        next(self.numbers)

    def state_dict(self) -> Any:
        return {"at": self.ring["at"], "step": self.inner.step, "first": self.pair[0]}

    def load_state_dict(self, state: Any) -> None:
        self.ring["at"], self.inner.step = state["at"], state["step"]
        self.pair[0].copy_(state["first"])

    def looks(self) -> Any:
        ring = {**self.ring, "rows": self.ring["rows"].tolist()}
        cells = [cell.n for cell in self.cells]
        return copy.deepcopy((ring, vars(self.inner), [each.tolist() for each in self.pair], cells, repr(self.numbers)))


class Callback:
    def __init__(self, trainer: Any) -> None:
        self.trainer, self.calls = trainer, 0


@of_a_script
class Calling(Stepping):
    """Its callbacks know it."""

    def __init__(self) -> None:
        super().__init__()
        self.callbacks = [Callback(self)]

    def step(self) -> None:
        super().step()
        for each in self.callbacks:
            each.calls += each.trainer.steps

    def looks(self) -> Any:
        return [each.calls for each in self.callbacks], self.callbacks[0].trainer is self


@of_a_script
class Deleting(Stepping):
    def __init__(self) -> None:
        super().__init__()
        self.number, self.rows, self.same = 3, [1], 4

    def step(self) -> None:
        super().step()
        if self.steps == 2:
            del self.number, self.rows

    def looks(self) -> Any:
        return sorted(vars(self))


KINDS = [Calling, Partly, Deleting, Containers, Drawing, Slotted, Lazy, Resetting, Forgetting]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [0, 4])
def test_goes_on_as_before(kind: Any, steps: int) -> None:
    def made() -> Made:
        thing = kind()
        return {"thing": thing}, lambda _: thing.step(), thing.looks

    comes_back(made, steps, 7, changes=False)


@of_a_script
class Agent:
    def __init__(self) -> None:
        self.model, self.noise = nn.Linear(2, 2).bfloat16(), 1.0
        self.optimizer = Precise(self.model.parameters())


@of_a_script
class Trainer(Stepping):
    """What it saves of the model is rounded, and its scheduler is forgotten."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=2)
        self.agents = [Agent()]
        self.names = SimpleNamespace(average=nn.Linear(2, 2))

    def step(self) -> None:
        super().step()
        given = torch.tensor([[1.0, 0.3]])
        (agent,) = self.agents
        for model, optimizer in ((self.model, self.optimizer), (agent.model, agent.optimizer)):
            optimizer.zero_grad()
            model(given.to(model.weight.dtype)).square().sum().backward()
            optimizer.step()
        agent.noise *= 0.9
        self.plateau.step(1.0)
        with torch.no_grad():
            self.names.average.weight.lerp_(self.model.weight, 0.1)

    def state_dict(self) -> Any:
        model = {name: each.half() for name, each in self.model.state_dict().items()}
        return {"steps": self.steps, "model": model, "agent": self.agents[0].optimizer.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.model.load_state_dict(state["model"])
        self.agents[0].optimizer.load_state_dict(state["agent"])
        self.model.eval()

    def looks(self) -> Any:
        held = [self.model.weight, self.agents[0].model.weight, self.names.average.weight]
        held += [each["mean"] for each in self.agents[0].optimizer.state.values()]
        told = self.agents[0].noise, self.plateau.num_bad_epochs, self.model.training
        return repr(([(each.dtype, each.tolist()) for each in held], told, self.optimizer.param_groups[0]["lr"]))


@pytest.mark.parametrize("given", ["alone", "with its model"])
def test_what_a_trainer_holds_comes_back_to_the_bit_whatever_it_loads(given: str) -> None:
    def made() -> Made:
        thing = Trainer()
        parts = {} if given == "alone" else {"model": thing.model}
        return {**parts, "thing": thing}, lambda _: thing.step(), thing.looks

    comes_back(made, 4, 6)


@of_a_script
class Resumed(Stepping):
    def __init__(self) -> None:
        super().__init__()
        self.resumed, self.history, self.last = False, [0], [0]

    def step(self) -> None:
        super().step()
        self.history.append(self.steps)
        self.last = [self.steps]

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.resumed, self.history = True, []


@pytest.mark.parametrize("again", [True, False], ids=["a restart", "in place"])
def test_what_the_load_sets_otherwise_is_said(again: bool, capfd: pytest.CaptureFixture[str]) -> None:
    thing: Any = Resumed()
    life = Life(thing=thing)
    life.snapshot()
    thing.step()
    kept = life.snapshot()
    if again:
        thing = Resumed()
        life = Life(thing=thing)
    life.restore(kept)
    assert thing.resumed
    said = capfd.readouterr().err
    assert "thing.resumed is True now: its load_state_dict sets this value, but the training had another one" in said
    assert "thing.history differs from its value in the snapshot: its load_state_dict sets it" in said
    assert thing.last == [1]
    assert "thing.last" not in said


def test_what_cannot_be_kept_is_said_once_it_changes(capfd: pytest.CaptureFixture[str]) -> None:
    thing: Any = of_a_script(type("Odd", (Stepping,), {}))()
    thing.waits = [1]
    life = Life(thing=thing)
    life.snapshot()
    assert not capfd.readouterr().err
    thing.waits.append(iter([1, 2]))
    for _ in range(2):
        life.snapshot()
    assert capfd.readouterr().err.count("thing.waits is not kept") == 1


def test_what_grows_too_large_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    thing: Any = of_a_script(type("Long", (Stepping,), {}))()
    thing.rows = [0.0]
    life = Life(thing=thing)
    life.snapshot()
    for _ in range(3):
        thing.rows += [1.0] * 1500
        life.snapshot()
    assert capfd.readouterr().err.count("thing.rows has become too large to be saved next to its state_dict") == 1


def test_a_long_list_is_data() -> None:
    thing: Any = of_a_script(type("Long", (Stepping,), {}))()
    thing.rows = list(range(100_000))
    life = Life(thing=thing)
    life.snapshot()
    thing.rows.append(1)
    assert len(life.snapshot()[0]) < 10_000
