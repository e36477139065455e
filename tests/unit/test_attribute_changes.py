"""What a training makes of the attributes of its modules on the way comes back, or is named once: functions that are exchanged, names that
are deleted, objects of other people's classes."""

from __future__ import annotations

import argparse
import collections
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.fx
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from .lives import Life, Made, comes_back


def the_line(capfd: pytest.CaptureFixture[str]) -> str:
    """The only one on stderr."""
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Any) -> Any:
        return self.b(self.a(x))


AT = 3
"""The step in which something changes."""


def scripts(code: Any) -> Any:
    """What the script makes."""
    return eval(code, {"__name__": "__main__"})


def functions() -> Made:
    model: Any = Net()
    model.act, model.pool, model.made, model.layer = F.relu, F.avg_pool2d, F.relu, nn.Linear
    model.each, model.late = [F.relu], None

    def step(n: int) -> None:
        if n == AT:
            model.act, model.pool, model.made, model.layer = F.gelu, F.max_pool2d, torch.tanh, nn.Tanh
            model.each[0], model.late, model.a.act = torch.sigmoid, max, F.silu

    def looks() -> Any:
        held = (model.act, model.pool, model.made, model.layer, *model.each, model.late, getattr(model.a, "act", None))
        return repr(held)

    return {"model": model}, step, looks


def of_other_people(config: Callable[[], Any]) -> Made:
    model: Any = Net()
    model.args, model.made, model.same = argparse.Namespace(heat=1.0, deep=[1]), None, argparse.Namespace(path="/tmp")
    model.config = model.a.config = config()
    model.quasi = torch.quasirandom.SobolEngine(2)

    def step(n: int) -> None:
        model.quasi.draw(1)
        if n >= AT:
            model.args.heat *= 0.9
            model.args.deep.append(n)
            model.config["k"] = n
            model.made = argparse.Namespace(n=n)

    def looks() -> Any:
        assert model.config is model.a.config
        held = model.args.heat, model.args.deep, dict(model.config), model.made and model.made.n
        return repr((*held, model.quasi.num_generated, model.quasi.quasi.tolist()))

    return {"model": model}, step, looks


def user_dicts() -> Made:
    return of_other_people(lambda: collections.UserDict(k=0))


def omegaconf() -> Made:
    conf = pytest.importorskip("omegaconf")
    return of_other_people(lambda: conf.OmegaConf.create({"k": 0, "in": {"s": [1, 2]}}))


def lightnings() -> Made:
    data = pytest.importorskip("lightning_fabric.utilities.data")
    return of_other_people(lambda: data.AttributeDict(k=0))


def deleted() -> Made:
    model: Any = Net()
    model.warm, model.a.frozen, model.b.weight.scale, model.memory, model.a.table = 0.5, 1, 0.3, [1], {}
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.boost = 2.0

    def step(n: int) -> None:
        if n == AT:
            del model.warm, model.a.frozen, model.b.weight.scale, model.memory, model.a.table, optimizer.boost

    def looks() -> Any:
        named = {"warm", "frozen", "scale", "memory", "table", "boost"}
        held = [named & vars(each).keys() for each in (model, model.a, model.b.weight, optimizer)]
        return repr([*map(sorted, held)])

    return {"model": model, "optimizer": optimizer}, step, looks


def hidden_states() -> Made:
    model: Any = Net()
    model.hidden, model.states, model.a.last = None, {"list": [], "count": 0}, None

    def step(n: int) -> None:
        before = 0 if model.hidden is None else model.hidden[0].detach()
        at = model.a(torch.full((1, 4), float(n))) + before
        model.hidden, model.states["list"], model.a.last = (at, at * 2), [at[0], n], at.sum()
        model.late = at * 3
        at.sum().backward()

    def looks() -> Any:
        held = (*(model.hidden or ()), *model.states["list"], model.a.last, getattr(model, "late", None))
        return repr([each.tolist() if isinstance(each, torch.Tensor) else each for each in held])

    return {"model": model}, step, looks


def private_names() -> Made:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    model._iteration, model[0]._scores, model[1]._seen, optimizer._updates, optimizer._rows = (
        0,
        torch.zeros(2),
        [],
        0,
        [],
    )

    def step(n: int) -> None:
        model._iteration += 1
        model[0]._scores += n
        model[1]._seen.append(n)
        optimizer._updates += 1
        optimizer._rows.append(n)

    def looks() -> Any:
        held = model._iteration, model[0]._scores.tolist(), model[1]._seen
        return repr((*held, optimizer._updates, optimizer._rows))

    return {"model": model, "optimizer": optimizer}, step, looks


class Slotted(nn.Module):
    __slots__ = ("calls", "late", "none")

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "calls", 0)
        object.__setattr__(self, "none", 1)


def slots() -> Made:
    model: Any = Slotted()

    def step(n: int) -> None:
        object.__setattr__(model, "calls", model.calls + 1)
        object.__setattr__(model, "late", [n])
        if n == AT:
            object.__delattr__(model, "none")

    def looks() -> Any:
        return repr((model.calls, getattr(model, "late", None), getattr(model, "none", None)))

    return {"model": model}, step, looks


def of_torch() -> Made:
    model, layer = torch.fx.symbolic_trace(Net()), nn.Linear(2, 2)
    parametrizations.spectral_norm(layer)
    model.count, norm = 0, layer.parametrizations.weight[0]

    def step(n: int) -> None:
        model.count += 1
        norm.n_power_iterations = n

    return {"model": model, "layer": layer}, step, lambda: repr((model.count, norm.n_power_iterations))


def slow_weights() -> Made:
    """As in Lookahead written by hand: each parameter stands beside a copy of it."""
    model: Any = Net()
    model.slow = [(each, each.detach().clone()) for each in model.parameters()]
    model.by_name, model.rows = {"w": model.a.weight, "n": 0}, [model.a.weight.detach()[0], 0]

    def step(n: int) -> None:
        for fast, slow in model.slow:
            fast.data.add_(1)
            slow.add_(n)
        model.by_name["n"] = model.rows[1] = n

    def looks() -> Any:
        same = [fast is each for (fast, _), each in zip(model.slow, model.parameters(), strict=True)]
        held = [slow.tolist() for _, slow in model.slow]
        return repr((same, held, model.by_name["w"] is model.a.weight, model.by_name["n"], model.rows))

    return {"model": model}, step, looks


MADE = [
    slow_weights,
    slots,
    of_torch,
    private_names,
    hidden_states,
    deleted,
    functions,
    user_dicts,
    omegaconf,
    lightnings,
]


@pytest.mark.parametrize("make", MADE)
@pytest.mark.parametrize("kept_at", [AT - 1, AT + 2])
def test_comes_back_in_place_and_in_a_new_process(
    make: Callable[[], Made], kept_at: int, capfd: pytest.CaptureFixture[str]
) -> None:
    comes_back(make, kept_at, AT + 1 - kept_at if kept_at < AT else 1, often=True, changes=kept_at < AT)
    assert not capfd.readouterr().err


def test_a_function_without_a_name_is_named_once_where_it_is_exchanged(capfd: pytest.CaptureFixture[str]) -> None:
    model: Any = Net()
    remade = compile("lambda x: x + 1", "script", "eval")
    model.act, model.other = scripts("lambda x: x"), scripts("lambda x: x")

    def remake() -> None:
        model.remade = scripts(remade)

    remake()
    life = Life(model=model)
    life.snapshot()
    remake()
    life.snapshot()
    assert not capfd.readouterr().err
    model.act = scripts("lambda x: -x")
    for _ in range(2):
        kept = life.snapshot()
    life.restore(kept)
    said = the_line(capfd)
    assert "model.act is not kept" in said
    assert "is a function" in said


def averager() -> Any:
    """As in EnCodec."""
    total: dict[str, float] = collections.defaultdict(float)
    calls, seen, rate = 0, [0], [0.9]

    def average(value: float) -> float:
        nonlocal calls
        calls += 1
        total["x"] += value * rate[0]
        seen.append(calls)
        return total["x"] / calls

    return average


def test_a_function_that_counts_is_named_when_the_loop_begins(capfd: pytest.CaptureFixture[str]) -> None:
    model: Any = Net()
    model.average, model.other = averager(), functools.partial(max, 1)
    Life(model=model).snapshot()
    assert "model.average is not kept" in (said := the_line(capfd))
    assert "it is a function that changes calls, seen, total from call to call" in said


def test_one_attribute_for_another_that_was_none_is_told() -> None:
    model: Any = Net()
    model.none = None
    life = Life(model=model)
    life.snapshot()
    del model.none
    model.fresh = 3
    kept = life.snapshot()
    other: Any = Net()
    other.none = None
    Life(model=other).restore(kept)
    assert other.fresh == 3


class Averages:
    """Of an installed package, as torch_ema's."""

    def __init__(self) -> None:
        self.shadow = torch.zeros(2)

    def state_dict(self) -> Any:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: Any) -> None:
        self.shadow = state["shadow"]


class Ordered:
    """As sortedcontainers' lists: it says by itself how it is copied."""

    def __init__(self, rows: Any) -> None:
        self.rows = np.empty(1, dtype=object)
        self.rows[0] = [*rows]

    def __reduce__(self) -> Any:
        return type(self), (self.rows[0],)


class Boxed(dict):  # type: ignore[type-arg]
    """As python-box's, whose `items` give something else."""

    def __init__(self, **given: Any) -> None:
        super().__init__(given)
        self.lock = threading.Lock()

    def items(self) -> Any:
        return [(key, "other") for key in self]


def put(name: str, make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda model: setattr(model, name, make(model))


Named = tuple[Callable[[Any], Any], Callable[[Any], Any], str]
"""What a model holds, what then changes about it, and what the rank says about that."""
NAMED: dict[str, Named] = {
    "an object with a lock": (
        lambda m: argparse.Namespace(lock=threading.Lock(), at=0),
        lambda m: setattr(m.held, "at", m.held.at + 1),
        "",
    ),
    "weak references": (
        lambda m: weakref.WeakKeyDictionary({m.a: 1.0}),
        lambda m: m.held.__setitem__(m.b, 2.0),
        "",
    ),
    "an object with a state_dict": (lambda m: Averages(), lambda m: m.held.shadow.add_(1), ""),
    "a class that says how it is copied": (lambda m: Ordered([1]), lambda m: m.held.rows[0].append(2), ""),
    "a mapping with items of its own": (
        lambda m: argparse.Namespace(deep=Boxed(count=1)),
        lambda m: m.held.deep.__setitem__("count", m.held.deep["count"] + 1),
        "",
    ),
    "a sparse tensor": (lambda m: torch.eye(3).to_sparse(), put("held", lambda m: m.held * 2), ""),
    "a function in a mapping": (lambda m: {}, lambda m: m.held.__setitem__("f", lambda: 0), ""),
    "a large tensor with a graph": (
        lambda m: None,
        put("held", lambda m: m.a.weight.sum() * torch.ones(1 << 25)),
        "is large",
    ),
    "an optimizer": (
        lambda m: None,
        put("held", lambda m: torch.optim.Adam(m.parameters())),
        "its Adam was created after the Session. Create it before, and give it to the Session",
    ),
}


class Activations:
    pass


class Remembers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, activations: Activations) -> Any:
        ctx.activations = activations
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


@pytest.mark.parametrize("elements", [1, 1 << 25], ids=["small", "large"])
def test_no_snapshot_keeps_a_graph_alive_that_the_script_has_let_go(elements: int) -> None:
    """The activations of a whole step hang on it."""
    model: Any = Net()
    model.held = None
    life = Life(model=model)
    for _ in range(2):
        activations = Activations()
        model.held = Remembers.apply(model.a.weight.sum() * torch.ones(elements), activations)
        seen = weakref.ref(activations)
        del activations
        life.snapshot()
        assert seen() is not None, "the model has it"
    model.held = None
    assert seen() is None


@pytest.mark.parametrize("what", NAMED)
def test_what_changes_and_cannot_be_kept_is_named_once(
    what: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (Averages, Ordered, Boxed):
        monkeypatch.setattr(kind, "__module__", "installed_averages")
    made, change, why = NAMED[what]
    model: Any = Net()
    model.held = made(model)
    life = Life(model=model)
    for _ in range(2):
        life.snapshot()
    assert not capfd.readouterr().err
    for _ in range(2):
        change(model)
        kept = life.snapshot()
    life.restore(kept)
    said = the_line(capfd)
    assert "model.held is not kept" in said
    assert why in said


def test_an_object_of_other_people_that_stays_as_it_is_costs_nothing() -> None:
    model: Any = Net()
    model.args = argparse.Namespace(path="/here", deep={"x": [1, 2]}, size=torch.ones(2))
    life = Life(model=model)
    life.snapshot()
    assert b".attributes" not in life.snapshot()[0]


@pytest.mark.parametrize("with_a_value", [False, True])
def test_an_object_that_two_sources_get_on_the_way_is_named_once(
    with_a_value: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    one, two, values = Net(), Net(), {}
    one.always = two.always = []  # type: ignore[assignment]
    args: Any = argparse.Namespace(n=0)
    one.args = two.args = values["args"] = args
    life = Life(one=one, two=two, values=values)
    life.snapshot()
    args.n = 1
    life.snapshot()
    life.restore(life.snapshot())
    life.snapshot()
    assert not capfd.readouterr().err
    bank: Any = torch.zeros(2)
    one.bank = bank
    if with_a_value:
        values["bank"] = bank
    else:
        two.bank = bank
    life.snapshot()
    life.snapshot()
    said = the_line(capfd)
    assert "one.bank and " in said
    assert "have become one object" in said
