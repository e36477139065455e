"""Modules as a source of state: all that torch calls a module's state, and what has changed about it on the way, or a refusal by name."""

from __future__ import annotations

import io
import random
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from mt_resilient.resilience.errors import LayoutError, SnapshotError
from mt_resilient.training.state.modules.module_source import Modules

from .lives import Life


class Amaxes(nn.Module):
    """As TransformerEngine's: state that is neither parameter nor buffer, given as a tensor, as bytes, or as nothing yet."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.history = form, [0.0]

    def get_extra_state(self) -> Any:
        if self.form == "stream":
            return io.BytesIO(repr(self.history).encode())
        made = {"tensor": torch.tensor(self.history), "dict": {"h": self.history, "n": None}, "none": None}
        return made[self.form]

    def set_extra_state(self, state: Any) -> None:
        if self.form == "stream":
            self.history = [float(each) for each in state.read().decode().strip("[]").split(",")]
        elif self.form == "tensor":
            self.history = state.tolist()
        elif self.form == "dict":
            assert state["n"] is None
            self.history = state["h"]
        else:
            assert state is None


class Saving(nn.Linear):
    """Puts a key of its own into its state_dict, as quantized layers do."""

    scale = 1.0

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = torch.tensor(self.scale)

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        if f"{prefix}scale" in state:
            self.scale = float(state.pop(f"{prefix}scale"))
        super()._load_from_state_dict(state, prefix, *args)


def hooked() -> nn.Sequential:
    """Hooks of the script's put a key into the state_dict, and take it out again."""
    made = nn.Sequential(nn.Linear(2, 2), Saving(2, 2))
    made.seen = 0  # type: ignore[assignment]

    def put(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}seen"] = made.seen

    def take(state: dict[str, Any], prefix: str, *_: Any) -> None:
        made.seen = state.pop(f"{prefix}seen", made.seen)

    made._register_state_dict_hook(put)
    made._register_load_state_dict_pre_hook(take)
    return made


def test_extra_state_of_every_kind_comes_back() -> None:
    def made() -> nn.ModuleDict:
        return nn.ModuleDict({form: Amaxes(form) for form in ("tensor", "stream", "dict", "none")})

    live = made()
    life = Life(model=live)
    for module in live.values():
        module.history = [1.5, 2.5]
    kept = life.snapshot()
    for module in live.values():
        module.history = [9.0]
    another = made()
    life.restore(kept)
    Life(model=another).restore(kept)
    for form in ("tensor", "stream", "dict"):
        assert live[form].history == another[form].history == [1.5, 2.5]


def test_keys_that_a_state_dict_has_beside_tensors_come_back() -> None:
    live, another = hooked(), hooked()
    life = Life(model=live)
    live.seen, live[1].scale = 3, 2.0
    kept = life.snapshot()
    live.seen, live[1].scale = 4, 5.0
    for model, restoring in ((live, life), (another, Life(model=another))):
        restoring.restore(kept)
        assert (model.seen, model[1].scale) == (3, 2.0)


def test_extra_state_that_cannot_be_put_back_is_refused() -> None:
    class Half(nn.Module):
        def get_extra_state(self) -> Any:
            return 1

    with pytest.raises(SnapshotError, match=r"the module 0 \(Half\) has get_extra_state and no set_extra_state"):
        Life(model=nn.Sequential(Half())).snapshot()


class Tagged(torch.Tensor):
    """A subclass with a say in every operation, and ordinary bytes."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def two_parts() -> torch.Tensor:
    """As torchao's: a tensor that wraps others, and has no bytes of its own."""
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


def test_subclasses_are_filled_in_place() -> None:
    def made() -> nn.Module:
        module = nn.Module()
        module.tagged = nn.Parameter(torch.ones(3).as_subclass(Tagged))
        module.register_buffer("jagged", two_parts())
        module.plain = nn.Buffer(torch.ones(2))
        return module

    live, another = made(), made()
    life = Life(model=live)
    kept = life.snapshot()
    values = live.jagged.values()
    with torch.no_grad():
        live.tagged.mul_(3)
        values.mul_(3)
        live.plain.mul_(3)
    tripled = life.snapshot()
    life.restore(kept)
    assert torch.equal(live.tagged.as_subclass(torch.Tensor), torch.ones(3))
    assert torch.equal(values, torch.ones(5))
    Life(model=another).restore(tripled)
    assert type(another.tagged.data) is Tagged or isinstance(another.tagged, Tagged)
    assert torch.equal(another.jagged.values(), torch.full((5,), 3.0))
    assert torch.equal(another.plain, torch.full((2,), 3.0))


def masked() -> torch.Tensor:
    from torch.masked import masked_tensor

    return masked_tensor(torch.ones(3), torch.tensor([True, False, True]))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lazy": (
        lambda: nn.Sequential(nn.LazyLinear(2)),
        r"the parameter 0.weight, a .*UninitializedParameter, can't be saved: it has no shape yet. Run one forward pass",
    ),
    "lazy buffers": (lambda: nn.LazyBatchNorm1d(affine=False), "the buffer running_mean, .*UninitializedBuffer"),
    "masked": (lambda: _with_buffer(masked()), r"the buffer it, a torch.masked.*MaskedTensor.*hides its bytes"),
    "meta": (lambda: nn.Linear(2, 2, device="meta"), "the parameter weight, .*is on the meta device.*to_empty"),
}


def _with_buffer(tensor: torch.Tensor) -> nn.Module:
    made = nn.Module()
    made.register_buffer("it", tensor)
    return made


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_has_no_bytes_of_its_own_is_refused_by_name(what: str) -> None:
    make, said = REFUSED[what]
    with pytest.raises(SnapshotError, match=said):
        Life(model=make()).snapshot()


def test_wrapped_weights_come_back() -> None:
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
            nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
            nn.utils.spectral_norm(nn.Linear(3, 3)),
            nn.Linear(3, 3),
            nn.ParameterList([nn.Parameter(torch.randn(2)) for _ in range(2)]),
        )
        prune.random_unstructured(model[3], "weight", 0.5)
        model[1].bias = model[0].bias
        return model

    def through(model: nn.Sequential) -> torch.Tensor:
        return model[3](model[2](model[1](model[0](torch.ones(2, 3))))) + model[4][0].sum()

    live = made()
    through(live)
    for parameter in live.parameters():
        parameter.data += 0.1
    kept = Life(model=live).snapshot()
    another = made()
    Life(model=another).restore(kept)
    assert torch.equal(through(another), through(live))
    assert another[1].bias is another[0].bias


class Keeping(nn.Linear):
    """Has plain attributes that belong to the state, and others that do not."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls, self.rate, self.hidden, self.table = 0, 0.5, None, {}
        self.mean, self.dice = torch.zeros(2), random.Random(1)
        self.rule, self.lock, self.all = (lambda: 1), threading.Lock(), [self.weight]
        self.drop, self.place = nn.Dropout(0.5), torch.device("cpu")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean += inputs.mean(0)
        self.last = super().forward(inputs)  # with a graph behind it
        self.table[self.calls % 2] = self.mean.clone()
        self.hidden = self.mean * self.dice.random()
        if self.calls == 2:
            self.drop.p, self.late, self.later = 0.25, "late", [self.calls]
        return self.last

    def looks(self) -> Any:
        table = {key: each.tolist() for key, each in self.table.items()}
        hidden = None if self.hidden is None else self.hidden.tolist()
        late = getattr(self, "late", ""), getattr(self, "later", None)
        return self.calls, self.drop.p, late, hidden, table, self.mean.tolist(), self.dice.getstate()


def test_plain_attributes_come_back() -> None:
    def made() -> tuple[Keeping, Life]:
        model = Keeping()
        return model, Life(model=model)

    model, life = made()
    states = []
    for number in range(4):
        states.append((life.snapshot(), model.looks()))
        model(torch.full((3, 2), number / 7))
    for kept, looks in reversed(states):
        live = model.mean, model.table
        life.restore(kept)
        assert model.looks() == looks
        assert (model.mean, model.table) == live, "in place"
        another, fresh = made()
        fresh.restore(kept)
        assert another.looks() == looks
        assert fresh.snapshot()[0] == kept[0]
    assert model.all[0] is model.weight
    assert b"rule" not in states[-1][0][0]
    assert b"/all" not in states[-1][0][0]
    assert b"place" not in states[-1][0][0], "the device of another rank may be another one"


class Learner(nn.Module):
    """Whose teachers are no part of it, so that no optimizer has them; and that knows its own layer by a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.teachers, self.others = [nn.BatchNorm1d(2)], {"slow": nn.Linear(2, 2)}
        self.__dict__["last"] = nn.Linear(2, 1)
        self.all = [self.net]

    def hidden(self) -> list[nn.Module]:
        return [*self.teachers, *self.others.values(), self.last]


def test_modules_that_are_no_part_of_theirs_come_back() -> None:
    model = Learner()
    life = Life(model=model)
    assert [*life.sources] == ["model", "model.teachers.0", "model.others.slow", "model.last"]
    kept = life.snapshot()
    before = [each.clone() for hidden in model.hidden() for each in hidden.state_dict().values()]
    another = Learner()
    with torch.no_grad():
        for tensor in (each for hidden in model.hidden() for each in hidden.state_dict().values()):
            tensor += 1
    for live, sources in ((model, life), (another, Life(model=another))):
        sources.restore(kept)
        after = [each for hidden in live.hidden() for each in hidden.state_dict().values()]
        assert all(map(torch.equal, after, before))


def test_layers_that_are_as_at_the_beginning_tell_nothing() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.LSTM(2, 2), nn.MultiheadAttention(2, 1))
    life = Life(model=model)
    assert b".attributes" not in life.snapshot()[0]
    model[1].momentum = 0.3
    assert b"momentum" in life.snapshot()[0]


def test_expanded_buffers_come_back() -> None:
    def made() -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_buffer("wide", torch.zeros(3, 1).expand(3, 4))
        return model

    model, another = made(), made()
    model.wide[:, 0] = torch.arange(3.0)
    kept = Life(model=model).snapshot()
    Life(model=another).restore(kept)
    assert torch.equal(another.wide, model.wide)
    assert another.wide.stride() == (1, 0)


def test_a_buffer_that_is_trained_from_some_step_on() -> None:
    model, another = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    life = Life(model=model)
    begun = life.snapshot()
    model.running_mean.requires_grad_()
    kept = life.snapshot()
    Life(model=another).restore(kept)
    assert another.running_mean.requires_grad
    life.restore(begun)
    assert not model.running_mean.requires_grad


# -- what changes on the way ----------------------------------------------------------------------------------------------


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("cache", torch.zeros(1, 2))
        self.register_buffer("later", None)
        self.register_buffer("early", torch.ones(2), persistent=False)
        self.table = nn.Parameter(torch.ones(2, 2))


def turn(model: Cached) -> None:
    model.inner.weight.data = torch.arange(4.0).reshape(2, 2).t()
    model.cache = torch.arange(6.0).reshape(3, 2).t()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "grow": lambda m: setattr(m, "cache", torch.arange(6.0).reshape(3, 2)),
    "appear": lambda m: setattr(m, "later", torch.arange(3)),
    "vanish": lambda m: setattr(m, "early", None),
    "come": lambda m: m.inner.register_buffer("angles", torch.full((4,), 2.0, dtype=torch.float64), persistent=False),
    "go": lambda m: delattr(m, "early"),
    "enlarge": lambda m: setattr(m.table, "data", torch.full((5, 2), 3.0)),
    "narrow": lambda m: setattr(m, "cache", m.cache.half()),
    "freeze": lambda m: m.inner.weight.requires_grad_(False),
    "evaluate": lambda m: m.inner.eval(),
    "turn": turn,
}


def looks(model: nn.Module) -> Any:
    """All that there is to be seen of it."""
    buffers = {
        f"{path}.{name}": None if b is None else (b.dtype, b.stride(), b.tolist())
        for path, module in model.named_modules()
        for name, b in module._buffers.items()
    }
    hidden = [sorted(module._non_persistent_buffers_set) for module in model.modules()]
    parameters = {n: (p.dtype, p.requires_grad, p.stride(), p.tolist()) for n, p in model.named_parameters()}
    return buffers, parameters, hidden, [m.training for m in model.modules()], [*model.state_dict()]


def started() -> tuple[Cached, Life, tuple[bytes, dict[str, bytes]]]:
    torch.manual_seed(0)
    model = Cached()
    life = Life(model=model)
    return model, life, life.snapshot()


@pytest.mark.parametrize("change", [*CHANGES, *((a, b) for a in CHANGES for b in CHANGES if a < b)], ids=str)
def test_what_changed_on_the_way_comes_back(change: str | tuple[str, str]) -> None:
    model, life, begun = started()
    at_first = looks(model)
    for each in (change,) if isinstance(change, str) else change:
        try:
            CHANGES[each](model)
        except AttributeError:  # gone already
            continue
    kept, changed = life.snapshot(), looks(model)
    another, fresh, _ = started()
    fresh.restore(kept)
    assert looks(another) == changed, "in a new process"
    assert fresh.snapshot() == kept
    life.restore(begun)
    assert looks(model) == at_first, "back in place, to before it"
    assert life.snapshot() == begun
    life.restore(kept)
    assert looks(model) == changed, "and to behind it"


def test_an_unchanged_state_says_nothing_of_its_form() -> None:
    _, _, (table, _) = started()
    assert b".changed" not in table
    assert b".extra" not in table


def wider() -> Cached:
    model = Cached()
    model.cache = torch.zeros(2, 2)
    return model


def test_another_model_is_told_from_one_that_has_changed() -> None:
    _, _, begun = started()
    with pytest.raises(LayoutError, match=r"cache: the snapshot holds float32 \(1, 2\), this run has float32 \(2, 2\)"):
        Life(model=wider()).restore(begun)


def append(model: nn.Sequential) -> None:
    model.append(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (append, "2 is new"),
        (
            lambda m: m.__setitem__(1, nn.ReLU()),
            "1 is a torch.nn.modules.activation.ReLU, and was a torch.nn.modules.activation.Tanh",
        ),
        (lambda m: prune.random_unstructured(m[0], "weight", 0.5), "0.weight is gone"),
        (lambda m: nn.utils.parametrizations.weight_norm(m[0]), "0 is a .*ParametrizedLinear, and was a"),
        (lambda m: m.__delitem__(0), "0 is a .*Tanh, and was a"),
    ],
    ids=["append", "exchange", "cut", "normalise", "remove"],
)
def test_modules_that_a_restart_could_not_make(change: Callable[[nn.Sequential], Any], said: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    life = Life(model=model)
    kept, before, inputs = life.snapshot(), model[0].weight, torch.ones(1, 2)
    expected = model(inputs)
    change(model)
    changed, objects, then = life.snapshot(), life.objects(), model(inputs)
    assert re.search(f"have changed since the loop began.*{said}.*before the Session", life.bound)
    append(model)
    with torch.no_grad():
        for parameter in (*model.parameters(), before):
            parameter.mul_(2)
    life.restore(changed, objects)
    assert torch.equal(model(inputs), then), "a rewind in place takes them back, to behind the change"
    assert life.snapshot() == changed
    assert life.bound
    life.restore(kept)
    assert torch.equal(model(inputs), expected), "and to before it"
    assert model[0].weight is before
    assert life.snapshot() == kept, "and restarts can use them again"
    assert not life.bound


@pytest.mark.parametrize("together", [False, True])
def test_tensors_that_become_one_or_two_are_told(together: bool) -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    own, shared = model[1].running_mean, model[0].running_mean
    model[1].running_mean = own if together else shared
    life = Life(model=model)
    life.snapshot()
    model[1].running_mean = shared if together else own
    said = (
        r"1.running_mean is the buffer 0.running_mean, and was a buffer"
        if together
        else "is a buffer, and was the buffer"
    )
    life.snapshot()
    assert re.search(said, life.bound)


# -- what is judged -------------------------------------------------------------------------------------------------------


class Wild(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("lowest", torch.full((9,), torch.finfo(torch.float32).min))
        self.frozen = nn.Parameter(torch.full((2,), -torch.inf), requires_grad=False)
        self.padded = nn.Parameter(torch.tensor([[torch.nan], [1.0]]))
        self.wide = nn.Parameter(torch.full((2,), 1e300, dtype=torch.float64))
        self.turning = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.short = nn.Parameter(torch.full((4,), 6e4, dtype=torch.float16))
        self.whole = nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False)


@pytest.mark.parametrize("name", ["wide", "turning", "short"])
def test_what_was_not_finite_at_the_beginning_is_no_news(name: str) -> None:
    from mt_resilient.training.state.tensors.finite_check import finite, sums

    model = Wild()
    source = Modules([model])
    source.excuse()

    def sound() -> bool:
        with torch.no_grad():
            return finite(sums(source.judged(source.collect())))

    assert sound()
    getattr(model, name).data[1] = torch.nan
    assert not sound()
