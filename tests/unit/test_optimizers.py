"""Optimizers as sources of state: after a rewind in place and in a new process they go on to the same bits, or they are refused by name."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mt_resilient.resilience.errors import LayoutError, SnapshotError
from mt_resilient.training.state.optimizers.optimizers import Optimizers

from .lives import Life, Made, comes_back
from .peoples_optimizers import (
    Averaging,
    ById,
    ByParameter,
    Bytes,
    Calling,
    CallingAndDeclaring,
    Counting,
    CountingFunction,
    Declaring,
    Face,
    Flat,
    FlatAnyhow,
    FlatParameters,
    Hiding,
    Kinds,
    LateFlatParameters,
    LateInner,
    Lists,
    Lookahead,
    Sam,
    TensorStates,
    Ticking,
    Tied,
    Turned,
    Turning,
    warmed_up,
)

Make = Callable[[nn.Module], Any]


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def groups(model: nn.Module, **more: Any) -> list[dict[str, Any]]:
    return [{"params": [p], **more} for p in model.parameters()]


def tensor_rate(model: nn.Module) -> torch.optim.Optimizer:
    made = torch.optim.Adam(groups(model), lr=torch.tensor(0.05), capturable=False, foreach=False)
    made.decays = True  # type: ignore[attr-defined]
    return made


def decay(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = group["lr"] * 0.9 if not torch.is_tensor(group["lr"]) else group["lr"].mul_(0.97)


FLAT = ("padded", "pair", "bytes", "bytes of nobody", "views first", "last state", "chunks")

MADE: dict[str, Make] = {
    "numpy rate": lambda m: torch.optim.SGD(m.parameters(), lr=np.float64(0.05), momentum=np.float32(0.9)),  # type: ignore[arg-type]
    "numpy betas": lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, betas=(np.float64(0.8), np.float64(0.9))),
    "tensor rate, shared": tensor_rate,
    "keys of one's own": lambda m: torch.optim.SGD(
        groups(m, name="a", table=np.arange(3.0), names=["x", "y"], twin=next(m.parameters())), lr=0.05
    ),
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.05, max_iter=2, history_size=3),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.05),
    "lookahead": lambda m: Lookahead(torch.optim.AdamW(m.parameters(), lr=0.05)),
    "lookahead of lookahead": lambda m: Lookahead(Lookahead(torch.optim.SGD(m.parameters(), 0.05, 0.9), k=2)),
    "sam": lambda m: Sam(m.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9),
    "counting": lambda m: Counting(m.parameters()),
    "by parameter": lambda m: ByParameter(m.parameters()),
    "lists": lambda m: Lists(m.parameters()),
    "bytes": lambda m: Bytes(m.parameters()),
    "declaring": lambda m: Declaring(m.parameters()),
    "hiding": lambda m: Hiding(m.parameters()),
    "kinds": lambda m: Kinds(m.parameters()),
    "face": lambda m: Face(torch.optim.Adam(m.parameters(), 0.05)),
    "flat parameters made late": lambda m: LateFlatParameters(m.parameters()),
    "flat": lambda m: Flat(m.parameters()),
    **{f"flat, {way}": lambda m, way=way: FlatAnyhow(m.parameters(), way) for way in FLAT},
    "turning rows": lambda m: Turning(m.parameters()),
    "tied": lambda m: Tied(m.parameters()),
    "flat parameters": lambda m: FlatParameters(m.parameters()),
    "tensor states": lambda m: TensorStates(m.parameters()),
    "by id": lambda m: ById(m.parameters()),
    "turned": lambda m: Turned(m.parameters()),
    "changed defaults": lambda m: warmed_up(torch.optim.AdamW(m.parameters(), 0.05)),
    "calling": lambda m: Calling(m.parameters()),
    "calling and declaring": lambda m: CallingAndDeclaring(m.parameters()),
    "averaging": lambda m: Averaging(m.parameters(), network()),
}


class Training:
    def __init__(self, make: Make) -> None:
        self.model = network()
        self.optimizer = make(self.model)
        self.life = Life(model=self.model, optimizer=self.optimizer)

    def train(self, first: int, last: int) -> list[bytes]:
        for step in range(first, last):
            inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))

            def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
                self.model.zero_grad()
                loss = (self.model(inputs) - inputs[:, :2].sin()).square().mean()
                loss.backward()
                return loss

            if isinstance(self.optimizer, torch.optim.LBFGS):
                self.optimizer.step(closure)
            else:
                closure()
                self.optimizer.step()
            decay(self.optimizer)
        return [p.detach().numpy().tobytes() for p in self.model.parameters()]


@pytest.mark.parametrize("kept_at", [0, 1, 5])
@pytest.mark.parametrize("name", MADE)
def test_goes_on_to_the_same_bits(name: str, kept_at: int) -> None:
    training = Training(MADE[name])
    training.life.snapshot()  # the loop begins
    training.train(0, kept_at)
    kept = training.life.snapshot()
    expected = training.train(kept_at, 9)
    training.life.restore(kept)
    assert training.train(kept_at, 9) == expected, "after a rewind in place"
    another = Training(MADE[name])
    another.life.restore(kept)
    assert another.train(kept_at, 9) == expected, "in a new process"
    again = another.life.snapshot()
    assert (again[0], again[1]) == (lambda s: (s[0], s[1]))(training.life.snapshot()), (
        "and all that is kept is the same"
    )


def test_where_the_script_s_tensors_are_made_is_not_where_ours_are() -> None:
    """`torch.set_default_device`, after the model is built."""
    training = Training(lambda model: torch.optim.AdamW(model.parameters(), 0.05))
    training.train(0, 3)
    kept, fresh = training.life.snapshot(), Training(lambda model: torch.optim.AdamW(model.parameters(), 0.05))
    expected = training.train(3, 6)
    with torch.device("meta"):
        training.life.snapshot()
        fresh.life.restore(kept)
    assert fresh.train(3, 6) == expected


def test_values_of_groups_come_back_in_value_and_type() -> None:
    training = Training(MADE["numpy rate"])
    kept = training.life.snapshot()
    training.optimizer.param_groups[0]["lr"], training.optimizer.param_groups[0]["new"] = 1, 2
    training.life.restore(kept)
    (group,) = training.optimizer.param_groups
    assert type(group["lr"]) is np.float64
    assert group["lr"] == 0.05
    assert type(group["momentum"]) is np.float32
    assert "new" not in group


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (
            lambda m: torch.optim.SGD(groups(m, rule=lambda step: step), lr=0.1),
            r"optimizer\.param_groups\[0\]\['rule'\] can't",
        ),
        (
            lambda m: torch.optim.SGD(groups(m, thing=object()), lr=0.1),
            r"optimizer\.param_groups\[0\]\['thing'\] can't",
        ),
        (
            lambda m: Lookahead(Ticking(m.parameters())),
            r"optimizer\.optimizer\.ticks can't be saved: it is a itertools\.cycle",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(make: Make, named: str) -> None:
    with pytest.raises(SnapshotError, match=named):
        Training(make).life.snapshot()


def test_a_tensor_that_two_names_have_stays_one() -> None:
    training = Training(MADE["by parameter"])
    training.train(0, 2)
    kept = training.life.snapshot()
    another = Training(MADE["by parameter"])
    another.life.restore(kept)
    assert another.optimizer.first is next(iter(another.optimizer.velocity.values()))


def test_tensors_are_filled_and_containers_stay_the_same() -> None:
    training = Training(MADE["lists"])
    training.train(0, 5)
    state = training.optimizer.state[training.model[0].weight]
    held = state["history"], state["blocks"]["left"][0]
    kept = training.life.snapshot()
    training.train(5, 6)
    state["history"] = held[0]
    training.life.restore(kept)
    now = training.optimizer.state[training.model[0].weight]
    assert now is state
    assert now["history"] is held[0]
    assert now["blocks"]["left"][0] is held[1]


@pytest.mark.parametrize("way", FLAT)
def test_a_rewind_fills_the_shared_memory_that_is_there(way: str) -> None:
    training = Training(MADE[f"flat, {way}"])
    training.train(0, 2)
    means = [state["mean"] for state in training.optimizer.state.values()]
    kept, before = training.life.snapshot(), [each.clone() for each in means]
    training.train(2, 4)
    training.life.restore(kept)
    assert all(state["mean"] is each for state, each in zip(training.optimizer.state.values(), means, strict=True))
    assert all(map(torch.equal, means, before))


def test_tensors_that_came_into_one_memory_since_part_again() -> None:
    training = Training(MADE["counting"])
    optimizer, weight = training.optimizer, training.model[0].weight
    optimizer.one, optimizer.other, optimizer.old = torch.ones(2), torch.full((2,), 2.0), weight.detach().clone()
    kept, began = training.life.snapshot(), weight.detach().clone()
    optimizer.one, optimizer.other, optimizer.old = *torch.zeros(3).unfold(0, 2, 1), weight.detach()
    weight.data.add_(1)
    training.life.restore(kept)
    optimizer.one.add_(1)
    assert (optimizer.one.tolist(), optimizer.other.tolist()) == ([2.0, 2.0], [2.0, 2.0])
    optimizer.old.add_(1)
    assert torch.equal(weight, began)


def test_a_snapshot_that_tells_nothing_of_shared_memory_is_restored() -> None:
    """As those of before."""
    training = Training(MADE["flat, pair"])
    training.train(0, 3)
    table, content = training.life.snapshot()
    told = json.loads(table)
    parts = next(inner for name, inner in told["skeleton"]["dict"] if name == "optimizer")
    (part,) = [inner for _, inner in parts["dict"]]
    before = len(part["dict"])
    part["dict"] = [pair for pair in part["dict"] if pair[0] != "shared"]
    assert len(part["dict"]) == before - 1
    another = Training(MADE["flat, pair"])
    another.life.restore((json.dumps(told).encode(), content))
    means = [state["mean"].tolist() for state in another.optimizer.state.values()]
    assert means == [state["mean"].tolist() for state in training.optimizer.state.values()]


def test_an_optimizer_within_that_comes_on_the_way_is_told() -> None:
    training = Training(lambda m: LateInner(m.parameters()))
    training.life.snapshot()
    assert not training.life.bound
    training.train(0, 1)
    training.life.snapshot()
    assert re.search(r"the optimizer optimizer\.inner was added since.*before the Session", training.life.bound)
    with pytest.raises(LayoutError, match="another kind"):
        Training(lambda m: LateInner(m.parameters())).life.restore(training.life.snapshot())


def test_a_function_that_changes_variables_is_named_once(capfd: pytest.CaptureFixture[str]) -> None:
    training = Training(lambda m: CountingFunction(m.parameters()))
    for _ in range(2):
        training.life.snapshot()
    said = capfd.readouterr().err
    assert said.count("optimizer.rate is not kept") == 1
    assert "a function that changes calls from call to call" in said


def test_how_tensors_lie_in_memory_comes_back() -> None:
    training = Training(MADE["turned"])
    training.train(0, 2)
    another = Training(MADE["turned"])
    another.life.restore(training.life.snapshot())
    there, here = (each.optimizer.state[each.model[0].weight]["basis"][0] for each in (training, another))
    assert here.stride() == there.stride() == (1, 4)


def test_moments_lie_as_their_parameters_and_are_filled_in_place() -> None:
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters())
    life = Life(optimizer=optimizer)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    kept, moment = life.snapshot(), optimizer.state[model.weight]["exp_avg"]
    before = moment.clone()
    optimizer.step()
    life.restore(kept)
    assert optimizer.state[model.weight]["exp_avg"] is moment
    assert torch.equal(moment, before)


def unfreeze(training: Training) -> None:
    training.model[2].requires_grad_(True)
    fast = getattr(training.optimizer, "optimizer", training.optimizer)
    fast.add_param_group({"params": [*training.model[2].parameters()], "lr": 0.02, "name": "head", "counter": 0})


def frozen_head(wrapped: bool) -> Training:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        model[2].requires_grad_(False)  # type: ignore[index]
        made = torch.optim.Adam(model[0].parameters(), lr=0.05)  # type: ignore[index]
        return Lookahead(made) if wrapped else made

    return Training(make)


def changed_and_back(
    make: Callable[[], Training], change: Callable[[Training], None], kept_at: int
) -> tuple[Training, list[bytes]]:
    """A training whose groups change after three steps comes back to `kept_at`, in a new process and in place. Return it as it was before
    the first step, and what the nine steps give."""
    training = make()
    before = training.life.snapshot()
    training.train(0, 3)
    change(training)
    training.train(3, kept_at)
    kept = training.life.snapshot()
    expected = training.train(kept_at, 9)
    another = make()
    another.life.restore(kept)
    assert another.train(kept_at, 9) == expected, "in a new process"
    training.life.restore(kept)
    assert training.train(kept_at, 9) == expected, "in place"
    training.life.restore(before)
    return training, expected


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_group_that_comes_on_the_way_is_made_again(wrapped: bool) -> None:
    training, expected = changed_and_back(lambda: frozen_head(wrapped), unfreeze, 5)
    assert len(training.optimizer.param_groups) == 1
    assert not training.model[2].weight.requires_grad
    for part in (training.optimizer, getattr(training.optimizer, "optimizer", training.optimizer)):
        assert training.model[2].weight not in part.state
    training.train(0, 3)
    unfreeze(training)
    assert training.train(3, 9) == expected, "from before it came"


def swap(optimizer: Any) -> None:
    one, other = optimizer.param_groups[0]["params"], optimizer.param_groups[2]["params"]
    one[:], other[:] = list(other), list(one)


def drop(optimizer: Any) -> None:
    for parameter in optimizer.param_groups.pop(1)["params"]:
        del optimizer.state[parameter]


@pytest.mark.parametrize("change", [swap, drop, lambda o: o.param_groups.reverse()], ids=["swap", "drop", "reverse"])
def test_groups_that_change_their_parameters(change: Callable[[Any], None]) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam([{**group, "lr": 0.1 / (n + 1)} for n, group in enumerate(groups(model))])

    training, expected = changed_and_back(lambda: Training(make), lambda each: change(each.optimizer), 3)
    training.train(0, 3)
    change(training.optimizer)
    assert training.train(3, 9) == expected, "from before it"


def test_parameters_of_no_model_are_the_optimizers() -> None:
    def made() -> tuple[nn.Parameter, torch.optim.Optimizer, Life]:
        model, scale = network(), nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([*model.parameters(), scale], 0.1)
        return scale, optimizer, Life(model=model, optimizer=optimizer)

    scale, optimizer, life = made()
    scale.data += 1
    kept = life.snapshot()
    assert optimizer.param_groups[0]["params"][4] is scale
    assert kept[0].count(b"/main/") == kept[0].count(b"/main/0.4"), "and no others"
    scale.data += 1
    life.restore(kept)
    another, _, fresh = made()
    fresh.restore(kept)
    assert scale.tolist() == another.tolist() == [2.0, 2.0]


def test_a_group_of_parameters_that_nobody_knows_is_there_for_a_rewind_in_place() -> None:
    model, other, third = network(), network(), network()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    life = Life(model=model, optimizer=optimizer)

    def step() -> None:
        for each in (model, other, third):
            each(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    begun = life.snapshot(), life.objects()
    step()
    optimizer.add_param_group({"params": other.parameters()})
    step()
    kept, objects = life.snapshot(), life.objects()
    assert re.search("parameter group 1 has changed since the loop began.*Give the Session", life.bound)
    step()
    optimizer.add_param_group({"params": third.parameters()})
    step()
    life.restore(kept, objects)
    assert life.snapshot() == kept
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 4]
    assert not any(parameter in optimizer.state for parameter in third.parameters())
    life.restore(*begun)
    assert life.snapshot() == begun[0]
    assert not life.bound


def test_groups_of_a_model_whose_layer_is_another_object_go_back_with_it() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    life = Life(model=model, optimizer=optimizer)
    kept, objects, before = life.snapshot(), life.objects(), [*model.parameters()]
    model[2] = nn.Linear(8, 2)
    optimizer.param_groups[0]["params"][2:] = model[2].parameters()
    assert "members" not in life.sources["optimizer"].collect()["0"], "a restart makes it again, by its name"  # type: ignore[attr-defined]
    assert not life.bound
    for there in ({}, objects):
        life.restore(kept, there)
        assert [*map(id, optimizer.param_groups[0]["params"])] == [*map(id, model.parameters())]
    assert [*map(id, model.parameters())] == [*map(id, before)]


def test_other_groups_at_the_start_are_another_optimizer() -> None:
    kept = Training(lambda m: torch.optim.SGD(m.parameters(), 0.1)).life.snapshot()
    with pytest.raises(LayoutError, match="the snapshot's started with 1: they"):
        Training(lambda m: torch.optim.SGD(groups(m), 0.1)).life.restore(kept)


def test_groups_made_before_the_loop_are_the_scripts() -> None:
    model = network()
    optimizer = torch.optim.SGD(model[0].parameters(), 0.1)
    source = Optimizers(optimizer)
    optimizer.add_param_group({"params": model[2].parameters()})
    assert "members" not in source.collect()["0"]


def test_what_a_script_saves_after_a_restart_has_the_same_bytes():
    """pickle writes a key that it has met before in another way than an equal one, which is another object."""

    def made():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        log = [{"loss": 1.0, "step": 1}, {"loss": 2.0, "step": 2}]
        life = Life(model=model, optimizer=optimizer, scheduler=scheduler, log={"all": log})
        return model, optimizer, scheduler, log, life

    def saved(model, optimizer, scheduler, log, _):
        into = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), log], into)
        return into.getvalue()

    one, another = made(), made()
    model, optimizer, scheduler, _, life = one
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    another[-1].restore(life.snapshot())
    assert saved(*another) == saved(*one)


class DynamicLossScaler:
    """As DeepSpeed's. It halves the scale at an overflow, and doubles it after two steps without one."""

    def __init__(self) -> None:
        self.cur_scale, self.cur_iter, self.last_overflow_iter, self.dtype = 2.0**16, 0, -1, torch.half

    def update_scale(self, overflow: bool) -> None:
        if overflow:
            self.cur_scale, self.last_overflow_iter = self.cur_scale / 2, self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % 2 == 0:
            self.cur_scale *= 2
        self.cur_iter += 1


class ZeroOptimizer:
    """As DeepSpeed's wrapper for ZeRO-1 and ZeRO-2."""

    __module__ = "deepspeed.runtime.zero.stage_1_and_2"

    def __init__(self, model: nn.Module) -> None:
        self.optimizer, self.loss_scaler = torch.optim.Adam(model.parameters()), DynamicLossScaler()
        self.param_groups = self.optimizer.param_groups


def test_deepspeed_s_loss_scaler_goes_on_with_its_scale_and_its_counts() -> None:
    optimizer = ZeroOptimizer(network())
    life = Life(optimizer=optimizer)
    for step in range(5):
        optimizer.loss_scaler.update_scale(step == 2)
    kept, before = life.snapshot(), dict(vars(optimizer.loss_scaler))
    optimizer.loss_scaler.update_scale(True)
    life.restore(kept)
    other = ZeroOptimizer(network())
    Life(optimizer=other).restore(kept)
    assert vars(optimizer.loss_scaler) == vars(other.loss_scaler) == before


class FusedAdam(torch.optim.Adam):
    """As TransformerEngine's with moments in fp16: in its state without their scales, which are in an attribute."""

    __module__ = "transformer_engine.pytorch.optimizers.fused_adam"

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.half)
                    self._scales[parameter] = {"exp_avg": torch.ones(1)}
                scale = self._scales[parameter]["exp_avg"]
                moment = state["exp_avg"].float() * scale * 0.9 + parameter.grad * 0.1
                torch.div(moment.abs().max().reshape(1), torch.finfo(torch.half).max / 2, out=scale)
                state["exp_avg"].copy_(moment / scale)
                parameter.data.sub_(moment, alpha=group["lr"])


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_scales_of_transformer_engine_s_moments_come_back_with_them(taken: int) -> None:
    def made() -> tuple[nn.Module, FusedAdam, Life]:
        model = network()
        optimizer = FusedAdam(model.parameters())
        return model, optimizer, Life(model=model, optimizer=optimizer)

    def step(model: nn.Module, optimizer: FusedAdam, number: int) -> list[bytes]:
        optimizer.zero_grad()
        model(torch.randn(3, 4, generator=torch.Generator().manual_seed(number))).square().mean().backward()
        optimizer.step()
        scales = (each["exp_avg"] for each in optimizer._scales.values())
        return [each.detach().numpy().tobytes() for each in (*model.parameters(), *scales)]

    first = made()
    expected = []
    for number in range(6):
        if number == taken:
            kept = first[2].snapshot()
        expected.append(step(*first[:2], number))
    for model, optimizer, life in (first, made()):
        scales = dict(optimizer._scales)
        life.restore(kept)
        assert len(optimizer._scales) == (4 if taken else 0)
        assert all(optimizer._scales[each] is scale for each, scale in scales.items() if taken), "in place"
        assert [step(model, optimizer, number) for number in range(taken, 6)] == expected[taken:]


@pytest.mark.parametrize("kept_at", [1, 3, 5])
@pytest.mark.parametrize("kind", [torch.optim.Adam, Counting, ByParameter])
def test_the_state_of_a_parameter_that_is_in_no_group_for_a_while_is_kept(kept_at: int, kind: Any) -> None:
    def made() -> Made:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = kind(model.parameters())
        frozen = [*model[0].parameters()]

        def step(n: int) -> None:
            parameters = optimizer.param_groups[0]["params"]
            if n == 2:
                parameters[:] = parameters[2:]
            if n == 4:
                parameters[:] = [*frozen, *parameters]
            model(torch.ones(1, 2)).square().sum().backward()
            optimizer.step()
            model.zero_grad()

        def looks() -> Any:
            states = {n: optimizer.state.get(each, {}) for n, each in model.named_parameters()}
            held = {n: {key: v.tolist() for key, v in state.items()} for n, state in states.items()}
            return held, [each.tolist() for each in model.parameters()]

        return {"model": model, "optimizer": optimizer}, step, looks

    comes_back(made, kept_at, 2)
