"""What scripts put onto torch's own layers, onto parameters and into hooks comes back, or is named once; what torch and others put there
is left alone."""

from __future__ import annotations

import functools
import importlib.util
import io
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from .lives import Life, Made, comes_back

SCRIPT = """
class Track:
    def __init__(self):
        self.count, self.seen = 0, [0.0]

    def add(self, *_):
        self.count += 1
        self.seen.append(self.count / 7)

    def average(self, old, new, _):
        self.add()
        return old + (new - old) / self.count

    def __call__(self, *arguments):
        return self.average(*arguments) if len(arguments) == 3 and hasattr(arguments[0], "lerp") else self.add()


def counts(table, *_, rows=None):
    table["n"] += 1
    if rows is not None:
        rows += 1


def counts_steps(*_):
    pass


class Held(Track):
    def __init__(self, lock):
        super().__init__()
        self.lock = lock


class Declares(Track):
    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]
"""


@pytest.fixture(scope="module", autouse=True)
def script(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A file of the script's own."""
    path = tmp_path_factory.mktemp("script") / "people_s_script.py"
    path.write_text(SCRIPT)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[path.stem] = made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    yield made
    del sys.modules[path.stem]


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def on_layers(script: Any) -> Made:
    model: Any = network()
    model[0].scores, model.history, model.phase = torch.zeros(4), [], {"warm": True}
    model[2].track, model[2]._hidden, model.number = script.Track(), script.Track(), 0

    def step(_: int) -> None:
        model[0].scores += 1
        model.history.append(len(model.history))
        model.phase["warm"] = len(model.history) < 2
        model.phase[model[0]] = len(model.history)
        model[2].track.add()
        model[2]._hidden.add()
        model.number += 1
        model[1].late = [model.number]

    def looks() -> Any:
        tracks = [(each.count, each.seen) for each in (model[2].track, model[2]._hidden)]
        phase = model.phase["warm"], model.phase.get(model[0]), len(model.phase)
        late = getattr(model[1], "late", None)
        return repr((model[0].scores.tolist(), model.history, phase, tracks, model.number, late))

    return {"model": model}, step, looks


def in_hooks(script: Any) -> Made:
    model = network()
    one, two, three = (script.Track() for _ in range(3))
    model[0].register_forward_hook(one)
    model[1].register_forward_pre_hook(two.add)
    model[2].register_full_backward_hook(functools.partial(three.add, 1))
    last = script.Track()
    model[2].bias.register_hook(last)

    def step(_: int) -> None:
        model(torch.ones(1, 4)).sum().backward()

    return {"model": model}, step, lambda: repr([(e.count, e.seen) for e in (one, two, three, last)])


def in_partials(script: Any) -> Made:
    model, table, rows = network(), {"n": 0}, torch.zeros(2)
    model[0].register_forward_hook(functools.partial(script.counts, table, rows=rows))

    def step(_: int) -> None:
        model(torch.ones(1, 4))

    return {"model": model}, step, lambda: repr((table, rows.tolist()))


def removed(script: Any) -> Made:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    table = {"n": 0}
    model[0].register_forward_hook(lambda *_: None)
    handles: Any = [
        model[0].register_forward_hook(functools.partial(script.counts, table), with_kwargs=True),
        model[0].bias.register_hook(script.Track()),
        optimizer.register_step_pre_hook(script.counts_steps),
    ]
    model[0].register_forward_hook(script.Track())

    def step(_: int) -> None:
        if handles:
            handles.pop().remove()

    def looks() -> Any:
        first = model[0]
        held = (first._forward_hooks, first._forward_hooks_with_kwargs, first.bias._backward_hooks)
        return repr([*map(len, (*held, optimizer._optimizer_step_pre_hooks)), [type(e) for e in held[0].values()]])

    return {"model": model, "optimizer": optimizer}, step, looks


def on_optimizers(script: Any) -> Made:
    model, track = network(), script.Track()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    behind = script.Track()
    optimizer.register_step_pre_hook(track)
    optimizer.register_step_post_hook(behind.add)
    return (
        {"model": model, "optimizer": optimizer},
        lambda _: optimizer.step(),
        lambda: repr((track.count, track.seen, behind.count)),
    )


def averaged(script: Any) -> Made:
    model, track = network(), script.Track()
    average: Any = torch.optim.swa_utils.AveragedModel(model, avg_fn=track)
    average.updates = []

    def step(_: int) -> None:
        average.update_parameters(model)
        average.updates.append(track.count)

    return {"model": model, "average": average}, step, lambda: repr((track.count, track.seen, average.updates))


def on_parameters(script: Any) -> Made:
    model: Any = network()
    for parameter in model.parameters():
        parameter.average, parameter.main_grad = parameter.detach().clone(), torch.zeros(2)

    def step(_: int) -> None:
        for number, parameter in enumerate(model.parameters()):
            parameter.average += number
            parameter.steps = getattr(parameter, "steps", 0) + 1
            parameter.ds_status = parameter.steps

    def looks() -> Any:
        return repr([(p.average.tolist(), getattr(p, "steps", 0)) for p in model.parameters()])

    return {"model": model}, step, looks


class Own(nn.Module):
    def __init__(self, track: Any) -> None:
        super().__init__()
        self.inner, self.call = nn.Linear(2, 2), track.add


def methods(script: Any) -> Made:
    """A bound method of an object that nobody else has."""
    model = Own(script.Track())
    track = model.call.__self__
    return {"model": model}, lambda _: model.call(), lambda: repr((track.count, track.seen))


MADE = [on_layers, in_hooks, in_partials, removed, on_optimizers, averaged, on_parameters, methods]


@pytest.mark.parametrize("make", MADE)
@pytest.mark.parametrize("kept_at", [0, 2])
def test_comes_back_in_place_and_in_a_new_process(make: Callable[[Any], Made], kept_at: int, script: Any) -> None:
    kept = comes_back(lambda: make(script), kept_at, begun=False)
    assert b"main_grad" not in kept[0]
    assert b"ds_status" not in kept[0]


def test_tensors_and_objects_stay_the_same_ones(script: Any) -> None:
    given, step, _ = on_layers(script)
    model = given["model"]
    life, held = Life(**given), (model[0].scores, model.history, model[2].track, model[2].track.seen)
    kept = life.snapshot()
    step(0)
    life.restore(kept)
    assert all(
        a is b for a, b in zip(held, (model[0].scores, model.history, model[2].track, model[2].track.seen), strict=True)
    )


def test_what_came_before_modules_are_looked_at_again_is_told_still(script: Any) -> None:
    model: Any = network()
    life = Life(model=model)
    life.snapshot()
    model[0].weight.steps = model[0].calls = 3
    model.register_buffer("late", torch.zeros(1))
    table = life.snapshot()[0]
    assert table.count(b'"steps"') == table.count(b'"calls"') == 1
    life.restore(life.snapshot())
    assert model[0].weight.steps == 3


def test_hooks_that_are_not_there_any_more_are_left_out_and_named(
    script: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """A hook that only the first start registers, to write a summary, takes part in nothing."""
    model = network()
    model[0].register_forward_hook(script.Track())
    kept = Life(model=model).snapshot()
    Life(model=network()).restore(kept)
    assert "the hook 0_forward_hooks[0] is not registered in this run" in capfd.readouterr().err


def test_a_hook_that_is_removed_costs_no_snapshot_any_more(script: Any) -> None:
    model = network()
    handle = model[0].register_forward_hook(script.Track())
    life = Life(model=model)
    assert b'"seen"' in life.snapshot()[0]
    handle.remove()
    assert b'"seen"' not in life.snapshot()[0]


def test_only_the_hook_that_was_removed_is_removed(script: Any) -> None:
    """One that only the first start registers, and removes, has the place of another one in the next."""
    model = network()
    handle = model[0].register_forward_hook(script.Track())
    model[0].register_forward_hook(script.counts)
    life = Life(model=model)
    life.snapshot()
    handle.remove()
    kept, other = life.snapshot(), network()
    other[0].register_forward_hook(script.counts)
    Life(model=other).restore(kept)
    assert [*other[0]._forward_hooks.values()] == [script.counts]


def test_variables_of_a_hook_that_is_a_function_are_left_alone() -> None:
    """One that opens its file at the first call would find the number of calls, and no file."""
    calls, log = 0, None

    def hook(*_: Any) -> None:
        nonlocal calls, log
        log = io.StringIO() if calls == 0 else log
        calls += 1
        assert log is not None

    model = network()
    model[0].register_forward_hook(hook)
    life = Life(model=model)
    kept = life.snapshot()
    for _ in range(2):
        model(torch.ones(1, 4))
        life.restore(kept)
    assert calls == 2
    assert log is not None


def pruned(model: Any) -> Any:
    prune.l1_unstructured(model[0], "weight", 0.5)
    model[0].weight_orig.requires_grad_(False)
    model(torch.ones(1, 4))
    return model


def normed(model: Any) -> Any:
    nn.utils.spectral_norm(parametrizations.weight_norm(model[0]) and model[2])
    return model


def quantized(model: Any) -> Any:
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    made = torch.ao.quantization.prepare_qat(model.train())
    made(torch.ones(2, 4))
    return made


def offloaded(model: Any) -> Any:
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(model[0], hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True))
    return model


def compiled(model: Any) -> Any:
    model.compile(backend="eager")
    model(torch.ones(1, 4))
    return model


def layers(model: Any) -> Any:
    model.append(nn.LSTM(2, 2)).append(nn.MultiheadAttention(2, 1)).append(nn.TransformerEncoderLayer(2, 1, 4))
    model.append(nn.AdaptiveLogSoftmaxWithLoss(4, 10, [3, 6])).append(nn.Upsample(scale_factor=(2.0, 2.0)))
    return model


@pytest.mark.parametrize("wrap", [pruned, normed, quantized, offloaded, compiled, layers])
@pytest.mark.filterwarnings("ignore")
def test_what_others_put_there_is_left_alone(wrap: Callable[[Any], Any]) -> None:
    model = wrap(network())
    life = Life(model=model)
    life.snapshot()
    if wrap not in (layers, quantized):
        model(torch.ones(2, 4))
    table = life.snapshot()[0]
    assert b".attributes" not in table, table


def test_objects_with_a_state_dict_are_sources(script: Any, capfd: pytest.CaptureFixture[str]) -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    for layer in (one, other):
        layer.meter, layer.table = script.Declares(), {"all": [script.Declares()]}  # type: ignore[assignment]
    life = Life(model=one)
    life.snapshot()
    one.meter.add()  # type: ignore[union-attr,operator]
    one.table["all"][0].add()  # type: ignore[index,union-attr,operator]
    Life(model=other).restore(life.snapshot())
    assert (other.meter.count, other.table["all"][0].count) == (1, 1)  # type: ignore[index,union-attr,operator]
    assert capfd.readouterr().err == ""


def test_an_object_with_a_lock_comes_back(script: Any, capfd: pytest.CaptureFixture[str]) -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    for layer in (one, other):
        layer.held = script.Held(threading.Lock())  # type: ignore[assignment]
        layer.register_forward_hook(layer.held)  # type: ignore[arg-type]
    life = Life(model=one)
    life.snapshot()
    one(torch.ones(2))
    kept = life.snapshot()
    Life(model=other).restore(kept)
    assert other.held.count == 1  # type: ignore[union-attr]
    assert capfd.readouterr().err == ""


def test_what_cannot_be_kept_is_named_once(script: Any, capfd: pytest.CaptureFixture[str]) -> None:
    model: Any = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    for layer in model:
        layer.held = script.Held(iter(()))
        layer.register_forward_hook(layer.held)
    life = Life(model=model)
    model.meter = script.Declares()
    life.snapshot()
    life.snapshot()
    lines = capfd.readouterr().err.splitlines()
    assert sum("model.0.held is not kept" in line for line in lines) == 1, lines
    assert sum("model.meter is not kept" in line and "give it to the Session" in line for line in lines) == 1, lines
    assert sum("model.0_forward_hooks[0]" in line for line in lines) == 1
