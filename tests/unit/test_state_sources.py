"""What a script gives to its Session: every kind of value comes back as it was, in place where it can; the rest is refused by name."""

from __future__ import annotations

import collections
import io
import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import mt_resilient
from mt_resilient.checkpoint.format import pytree
from mt_resilient.resilience.errors import LayoutError, SnapshotError
from mt_resilient.training.state.sources import sources_of
from mt_resilient.training.state.values import class_adapters

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from document_tables import kinds

from . import kept
from .kept import THINGS, Best, Meter, Snapshot, of, told


@pytest.mark.parametrize("kind", THINGS)
def test_each_kind_comes_back_where_there_is_none_yet(kind: str) -> None:
    held = {"it": THINGS[kind](), "again": [1]}
    snapshot = Snapshot(of(held))
    snapshot.prove()
    before = told(held)
    other: dict[str, Any] = {}
    snapshot.restore(of(other))
    assert type(other["it"]) is type(held["it"])
    assert told(other) == before


@pytest.mark.parametrize("kind", THINGS)
def test_each_kind_comes_back_where_there_is_one(kind: str) -> None:
    thing = THINGS[kind]()
    held = {"it": thing}
    before, snapshot = told(held), Snapshot(of(held))
    snapshot.restore()
    assert told(held) == before
    if class_adapters.kind_of(type(thing)) is None or class_adapters.kind_of(type(thing)).fill is not None:  # type: ignore[union-attr]
        fixed = isinstance(thing, tuple) or (isinstance(thing, np.ndarray) and not thing.flags.writeable)
        assert fixed or held["it"] is thing


def test_generators_go_on_where_they_were() -> None:
    held = {
        "n": np.random.default_rng(1),
        "s": np.random.RandomState(2),
        "p": THINGS["random.Random"](),
        "t": torch.Generator(),
    }

    def drawn() -> list[Any]:
        numbers = [
            held["n"].random(),
            held["s"].normal(),
            held["p"].random(),
            torch.rand(1, generator=held["t"]).item(),
        ]
        return [*numbers, held["n"].spawn(1)[0].random()]

    snapshot = Snapshot(of(held))
    first = drawn()
    snapshot.restore()
    assert drawn() == first
    other: dict[str, Any] = {}
    snapshot.restore(of(other))
    held.update(other)
    assert drawn() == first


def test_the_live_objects_stay_and_all_in_them_is_as_it_was() -> None:
    tensor, array = torch.zeros(3), np.zeros(3)
    meter, best, recent = Meter(), Best(1.0, [1]), collections.deque([1], 4)
    state: dict[str, Any] = {"t": [tensor], "a": array, "m": meter, "b": best, "r": recent, "gone": 1}
    before, snapshot = told(state), Snapshot(of(state))
    tensor.fill_(1)
    array.fill(1)
    meter.total, meter.new = 5.0, 1  # type: ignore[attr-defined]
    best.history.append(2)
    recent += [1, 2, 3, 4]
    del state["gone"]
    state["new"] = {1, 2}
    snapshot.restore()
    assert told(state) == before
    assert list(state) == ["t", "a", "m", "b", "r", "gone"], "in their order, and none that is new"
    assert (state["t"][0], state["a"], state["m"], state["b"], state["r"]) == (tensor, array, meter, best, recent)
    assert state["t"][0] is tensor
    assert state["a"] is array
    assert not hasattr(meter, "new")


def test_two_names_of_one_thing_stay_so() -> None:
    one, tensor, meter = [1], torch.zeros(6), Meter()
    state: dict[str, Any] = {"a": one, "b": {"c": one}, "m": [meter, meter], "t": tensor, "u": tensor, "s": meter.seen}
    snapshot = Snapshot(of(state))
    for target in (state, {}):
        snapshot.restore(of(target))
        target["a"].append(2)
        assert target["b"]["c"] is target["a"]
        assert target["m"][0] is target["m"][1]
        assert target["s"] is target["m"][0].seen
        assert target["t"] is target["u"]
    assert one == [1, 2]


def test_what_has_become_one_thing_meanwhile_is_two_again() -> None:
    state: dict[str, Any] = {"a": [1], "b": [2], "t": torch.zeros(2), "u": torch.ones(2)}
    snapshot = Snapshot(of(state))
    state["b"], state["u"] = state["a"], state["t"][:]
    snapshot.restore()
    assert state["a"] == [1]
    assert state["b"] == [2]
    assert (state["t"].tolist(), state["u"].tolist()) == ([0, 0], [1, 1])


@pytest.mark.parametrize("fresh", [False, True])
def test_views_of_one_memory_stay_views_of_it(fresh: bool) -> None:
    tensor, array = torch.arange(6.0), np.arange(6)
    state: dict[str, Any] = {
        "part": tensor[2:4], "whole": tensor, "turned": tensor.view(2, 3).t(), "words": tensor.view(torch.int32),
        "back": array[::-1], "all": array, "odd": array[1::2],
    }  # fmt: skip
    parts = dict(state)
    before, snapshot = told(state), Snapshot(of(state))
    tensor.fill_(9)
    array.fill(9)
    target: dict[str, Any] = {} if fresh else state
    snapshot.restore(of(target))
    assert told(target) == before
    target["whole"].fill_(1)
    target["all"][1] = 5
    assert (target["part"].tolist(), target["turned"].sum(), target["odd"][0], target["back"][-2]) == ([1, 1], 6, 5, 5)
    assert fresh or all(target[name] is part for name, part in parts.items())


def test_a_list_that_holds_itself() -> None:
    state: dict[str, Any] = {"a": [1]}
    state["a"].append(state["a"])
    snapshot = Snapshot(of(state))
    snapshot.prove()
    state["a"].append(2)
    snapshot.restore()
    assert len(state["a"]) == 2
    assert state["a"][1] is state["a"]


class Silent:
    def __getstate__(self) -> Any:
        raise RuntimeError("not now")


def closed() -> io.BytesIO:
    buffer = io.BytesIO(b"x")
    buffer.close()
    return buffer


REFUSED: dict[str, tuple[Any, str]] = {
    "lock": (threading.Lock, r"\['x'\]\[1\] can't be saved: it is a _thread.lock"),
    "an object with one": (threading.Event, r"\['x'\]\[1\]\['_cond'\]\['_lock'\] can't be saved: it is a _thread.lock"),
    "lambda": (lambda: lambda: 0, "<lambda> is not found"),
    "file": (lambda: sys.stdout, "Wrapper|EncodedFile|CaptureIO"),
    "a closed file in memory": (
        closed,
        r"a BytesIO does not give its state \(ValueError: I/O operation on closed file",
    ),
    "a method of nobody": (lambda: types.MethodType(lambda self: 0, [1]), "its object has another <lambda>"),
    "a class that gives no state": (Silent, r"a Silent does not give its state \(RuntimeError: not now"),
    "iterator": (lambda: iter([1]), "list_iterator"),
    "generator": (lambda: (each for each in "ab"), "builtins.generator"),
    "module": (lambda: sys, "builtins.module"),
    "sentinel": (object, "builtins.object"),
    "graph": (lambda: torch.ones(1, requires_grad=True) * 2, "autograd graph"),
    "objects": (lambda: np.array([[], None], dtype=object), "Python objects"),
    "masked": (lambda: np.ma.array([1]), "numpy.ma.MaskedArray"),
    "subclass of Tensor": (lambda: torch.ones(1).as_subclass(type("Mine", (torch.Tensor,), {})), "Mine"),
    "tensor as a key": (lambda: {torch.ones(1): 1}, "compared by identity, not by value"),
    "class of a function": (lambda: type("Local", (), {"__module__": "nowhere"})(), "nowhere:Local is not found"),
    "one memory for both": (lambda: (lambda a: [a, torch.from_numpy(a)])(np.zeros(3)), "the same memory"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_kept_is_refused_before_the_first_step(kind: str) -> None:
    make, words = REFUSED[kind]
    with pytest.raises(SnapshotError, match=words) as refusal:
        of({"x": [0, make()]})
    assert "state['x'][1]" in str(refusal.value)
    assert "mt_resilient.register (docs/state.md)" in str(refusal.value)


NO_BYTES: dict[str, Any] = {
    "is not dense (torch.sparse_coo). Keep a dense tensor of plain numbers in its place": lambda: torch.eye(
        2
    ).to_sparse(),
    "is on the meta device. Give it memory (to_empty) before the Session": lambda: torch.ones(2, device="meta"),
    "is torch.qint8, quantized. Keep a dense tensor of plain numbers in its place": lambda: torch.quantize_per_tensor(
        torch.ones(3), 0.1, 0, torch.qint8
    ),
    "is a nested tensor. Keep a dense tensor of plain numbers in its place": lambda: torch.nested.nested_tensor(
        [torch.ones(2)], layout=torch.strided
    ),
}


def _module(tensor: Any) -> Any:
    made = torch.nn.Module()
    made.register_buffer("it", tensor)
    return made


def _optimizer(tensor: Any) -> Any:
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], "it": [tensor]}], 0.1)


class Saying:
    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def state_dict(self) -> Any:
        return {"it": self.tensor}

    def load_state_dict(self, state: Any) -> None:
        self.tensor = state["it"]


HOLDING: dict[str, Any] = {
    "state['it']": lambda tensor: {"it": tensor},
    "the buffer it": _module,
    "state.param_groups[0]['it'][0]": _optimizer,
    "state['it'] ": Saying,
}


@pytest.mark.parametrize("named", HOLDING)
@pytest.mark.parametrize("why", NO_BYTES)
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_without_bytes_is_refused_in_one_sentence_wherever_it_is(why: str, named: str) -> None:
    with pytest.raises(SnapshotError) as refusal:
        Snapshot(of(HOLDING[named](NO_BYTES[why]())))
    name, _, rest = str(refusal.value).partition(", ")
    assert rest == f"a torch.Tensor, can't be saved: it {why}"
    assert name in (named.strip(), "tensor 'state/it'")


class Forgets:
    def __init__(self) -> None:
        self.count = 1

    def __getstate__(self) -> dict[str, int]:
        return {"count": self.count}

    def __setstate__(self, state: dict[str, int]) -> None:
        self.count = 0


def test_what_does_not_come_back_the_same_is_found_before_the_first_step() -> None:
    snapshot = Snapshot(of({"x": Forgets()}))
    with pytest.raises(SnapshotError, match="would differ after a restore"):
        snapshot.prove()


class Ring:
    def __init__(self, size: int) -> None:
        self.size, self.lock = size, threading.Lock()
        self.rows = [0] * size


def test_what_is_registered_is_saved_as_its_owner_says() -> None:
    with pytest.raises(SnapshotError, match="lock"):
        of({"ring": Ring(2)})

    def restore(ring: Ring, rows: list[int]) -> None:
        ring.rows[:] = rows

    mt_resilient.register(Ring, lambda ring: ring.rows, restore, make=lambda: Ring(2))
    ring = Ring(2)
    state = {"ring": ring}
    snapshot = Snapshot(of(state))
    snapshot.prove()
    ring.rows[0] = 5
    snapshot.restore()
    assert state["ring"] is ring
    assert ring.rows == [0, 0]


def test_models_and_optimizers_inside_are_sources_of_their_own() -> None:
    models = {"g": nn.Linear(2, 2), "d": [nn.Linear(2, 1)]}
    optimizer = torch.optim.SGD(models["g"].parameters(), lr=0.1, momentum=0.9)  # type: ignore[union-attr]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 2])
    trainer = Meter()
    trainer.model, trainer.schedule = models["g"], schedule  # type: ignore[attr-defined]
    sources = sources_of({"models": models, "trainer": trainer, "optimizer": optimizer})
    assert [*sources] == ["models", "trainer", "optimizer", "models.g", "models.d.0", "trainer.schedule"]
    before, snapshot = models["g"].weight.clone(), Snapshot(sources)  # type: ignore[union-attr]
    snapshot.prove()
    models["g"].weight.data.fill_(7)  # type: ignore[union-attr]
    schedule.last_epoch = 9
    models["h"] = models.pop("g")
    snapshot.restore()
    assert torch.equal(models["g"].weight, before)  # type: ignore[union-attr]
    assert models.keys() == {"g", "d"}
    assert trainer.model is models["g"]  # type: ignore[attr-defined]
    assert schedule.last_epoch == 0


class Whole(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.optimizer = torch.optim.Adam(self.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)


def test_optimizers_that_a_module_holds_are_sources_of_their_own() -> None:
    whole = Whole()
    given = {"model": nn.Sequential(whole), "schedule": whole.schedule}
    assert [*sources_of(given)] == ["model", "schedule", "model.0.optimizer"]


def test_a_module_of_torchscript_is_refused() -> None:
    with pytest.raises(SnapshotError, match=r"model holds a torch.jit.ScriptModule.*Train the module"):
        sources_of({"model": torch.jit.script(nn.Linear(2, 2))})


def test_the_session_itself_may_be_in_what_it_is_given() -> None:
    session, trainer = Meter(), Meter()
    trainer.session = session  # type: ignore[attr-defined]
    snapshot = Snapshot(sources_of({"trainer": trainer}, session))
    trainer.session = None  # type: ignore[attr-defined]
    snapshot.restore()
    assert trainer.session is session  # type: ignore[attr-defined]


def test_a_model_that_comes_later_is_refused() -> None:
    models: dict[str, nn.Module] = {}
    sources = sources_of({"models": models})
    models["late"] = nn.Linear(1, 1)
    with pytest.raises(
        SnapshotError, match=r"models\['late'\] can't be saved: it is a Linear that the Session does not know"
    ):
        sources["models"].collect()


@pytest.mark.parametrize(
    "thing", [{1: 2}, [1], collections.deque([1]), Meter(), np.zeros(2), torch.zeros(2), collections.UserDict(a=1)]
)
def test_anything_that_can_be_filled_is_a_source(thing: Any) -> None:
    Snapshot(of(thing)).restore()


@pytest.mark.parametrize("thing", [1, "a", (1, 2), None.__class__, 1.5])
def test_what_cannot_be_filled_is_none(thing: Any) -> None:
    with pytest.raises(TypeError, match=r"Session\(state=…\)"):
        of(thing)


def test_a_root_keeps_its_own_class_and_factory() -> None:
    counts = collections.defaultdict(lambda: 0, {"a": 1})
    snapshot = Snapshot(of(counts))
    snapshot.prove()
    counts["b"] += 1
    snapshot.restore()
    assert counts == {"a": 1}
    assert counts["c"] == 0


def test_another_kind_of_thing_is_not_taken() -> None:
    snapshot = Snapshot(of([1]))
    with pytest.raises(LayoutError, match="had another type"):
        snapshot.restore(of(collections.deque([1])))


def test_a_mapping_of_an_older_snapshot() -> None:
    state = {"a": 0, "b": {1}}
    of(state)["state"].restore({"a": 1, "t": torch.ones(1)})
    assert (state["a"], state["b"]) == (1, {1})


@pytest.mark.parametrize("content", [0, [0], {"a": 1}, None, "os:system", ["os:system", 1, 2], [1, 2, 3]])
@pytest.mark.parametrize(
    "tag",
    [*class_adapters._BY_NAME, "object", "frozen dataclass", "alias", "source", "keys", "view", "array", "nothing"],
)
def test_a_hostile_value_is_refused_or_harmless(tag: str, content: Any) -> None:
    try:
        of({"x": 1})["state"].restore(pytree.Tagged(("", {"x": pytree.Tagged((tag, content))})))
    except (SnapshotError, LayoutError):
        pass


def test_no_snapshot_puts_a_function_of_python_s_own_where_the_script_had_none() -> None:
    with pytest.raises(LayoutError, match="os:system is a function of Python's own library"):
        of({"f": None})["state"].restore(pytree.Tagged(("", {"f": pytree.Tagged(("function or class", "os:system"))})))


names = st.sampled_from(["a", "b", 1, (1, "x"), None])
fixed = [kind for kind in THINGS if kind not in ("transposed", "expanded")]
drawn = st.recursive(
    st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from(fixed).map(lambda kind: THINGS[kind]()),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(names, inner, max_size=3)
        | st.lists(inner, max_size=2).map(tuple)
        | st.lists(inner, max_size=2).map(collections.deque)
        | inner.map(lambda each: Best(0.5, [each, each]))
        | st.tuples(inner, inner).map(lambda pair: kept.Point(*pair))
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=150)
@given(drawn, drawn, st.sets(st.sampled_from(["shared", "other", "new"])))
def test_drawn_states_come_back(one: Any, other: Any, changes: set[str]) -> None:
    state = {"one": one, "shared": [one, other], "other": other}
    before, snapshot = told(state), Snapshot(of(state))
    snapshot.prove()
    if "shared" in changes:
        state["shared"] = [other]
    if "other" in changes:
        del state["other"]
    if "new" in changes:
        state["new"] = state["one"] = 1
    snapshot.restore()
    assert told(state) == before
    fresh: dict[str, Any] = {}
    snapshot.restore(of(fresh))
    assert told(fresh) == before


def test_the_table_in_the_documents_is_the_present_one() -> None:
    document = Path(__file__).parents[2] / "docs" / "state.md"
    assert kinds() in document.read_text(), "scripts/kinds prints it"
