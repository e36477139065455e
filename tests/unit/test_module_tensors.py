"""Names of parameters and buffers are torch's own, whatever happens to a model between two looks."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from mt_resilient.training.state.modules.module_tensors import Names

from .lives import Life


class Own(nn.Linear):
    """One that names its parameters itself."""

    prefix = "own"

    def named_parameters(self, *args, **kwargs):
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield f"{self.prefix}.{name}", parameter


def model() -> nn.Sequential:
    made = nn.Sequential(
        nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    )
    made.register_buffer("table", torch.zeros(3), persistent=False)
    return made


def same(names: Names, *chunks: nn.Module) -> bool:
    found = [list(named.items()) for named in names.of(chunks)]
    prefixes = [f"chunk{index}." if len(chunks) > 1 else "" for index in range(len(chunks))]
    expected = [
        [
            (prefix + name, tensor)
            for prefix, chunk in zip(prefixes, chunks, strict=True)
            for name, tensor in named(chunk)
        ]
        for named in (lambda chunk: chunk.named_parameters(), lambda chunk: chunk.named_buffers())
    ]
    return all(
        len(ones) == len(others) and all(a == b and x is y for (a, x), (b, y) in zip(ones, others, strict=True))
        for ones, others in zip(found, expected, strict=True)
    )


def share(model: nn.Sequential) -> None:
    model[2]["b"] = model[2]["a"]


def swap_what_is_shared(model: nn.Sequential) -> None:
    a, b = model[2]["a"], model[2]["b"]
    model[2]["c"] = a
    model[2]["a"], model[2]["b"], model[2]["c"] = a, a, b


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "nothing": lambda m: None,
    "a parameter is replaced": lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(3, 3))),
    "its data is": lambda m: setattr(m[0].weight, "data", torch.ones(5)),
    "it becomes a buffer": lambda m: (delattr(m[0], "bias"), m[0].register_buffer("bias", torch.ones(3))),
    "it is gone": lambda m: setattr(m[0], "bias", None),
    "one more": lambda m: m[0].register_parameter("more", nn.Parameter(torch.ones(1))),
    "two are tied": lambda m: setattr(m[2]["a"], "weight", m[0].weight),
    "a buffer is replaced": lambda m: setattr(m, "table", torch.ones(3)),
    "a module is added": lambda m: m.append(nn.Linear(1, 1)),
    "a module is replaced": lambda m: m.__setitem__(0, nn.Linear(3, 3)),
    "a module is replaced by one with other names": lambda m: m.__setitem__(0, Own(3, 3)),
    "a module is gone": lambda m: m.__delitem__(0),
    "a module is None": lambda m: m.register_module("2", None),
    "a module is renamed": lambda m: m[2].update({"c": m[2].pop("a")}),
    "a module contains the whole": lambda m: m[2]._modules.__setitem__("whole", m),
    "a module is shared": share,
    "another one is shared": swap_what_is_shared,
    "one is shared with another": lambda m: m[2].update({"b": m[2]["c"]}),
    "a parameter is renamed": lambda m: m[0]._parameters.__setitem__("other", m[0]._parameters.pop("bias")),
    "a buffer is renamed": lambda m: m._buffers.__setitem__("other", m._buffers.pop("table")),
}


@pytest.mark.parametrize("first", CHANGES)
@pytest.mark.parametrize("then", CHANGES)
def test_after_every_change(first, then):
    live, names = model(), Names()
    assert same(names, live)
    for change in (first, then):
        try:
            CHANGES[change](live)
        except (KeyError, TypeError, AttributeError, IndexError):
            continue  # not after the other one
        assert same(names, live)
        assert same(names, live), "and when nothing has changed since"


def test_whoever_names_its_own_is_asked_each_time():
    own, names = Own(2, 2), Names()
    assert same(names, own)
    own.prefix = "another"
    assert same(names, own)


def test_two_chunks_and_one():
    one, two, names = model(), model(), Names()
    assert same(names, one, two)
    assert same(names, two, one)
    assert same(names, one)


def test_torch_is_asked_once_while_nothing_changes():
    live, names = model(), Names()
    names.of([live])
    live[0].weight.data = torch.ones(3, 3)
    asked: list[str] = []
    live.named_parameters = lambda: asked.append("named_parameters") or iter(())  # type: ignore[method-assign]
    assert list(names.of([live])[0]) == [name for name, _ in nn.Module.named_parameters(live)]
    assert not asked


class Distilled(nn.Module):
    """Its teacher is no business of an optimizer's."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(2, 2), nn.BatchNorm1d(2)

    def named_parameters(self, *arguments, **named):
        return self.student.named_parameters(*arguments, **named)

    def named_modules(self, *arguments, **named):
        return self.student.named_modules(*arguments, **named)


@pytest.mark.parametrize("below", [False, True])
def test_what_a_module_keeps_to_itself_is_named_too(below):
    own = Distilled()
    chunk = nn.Sequential(own) if below else own
    for _ in range(2):
        found = [id(each) for named in Names().of([chunk]) for each in named.values()]
        tensors = (own.student.weight, own.student.bias, own.teacher.weight, own.teacher.bias, *own.teacher.buffers())
        assert sorted(found) == sorted(map(id, tensors))


def test_a_teacher_that_no_optimizer_sees_comes_back():
    def made():
        torch.manual_seed(1)
        return Distilled()

    model = made()
    life = Life(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    life.snapshot()
    with torch.no_grad():
        model.teacher.weight.fill_(3.0)
        model.teacher.running_mean.fill_(4.0)
    kept, other = life.snapshot(), made()
    Life(model=other, optimizer=torch.optim.SGD(other.parameters(), 0.1)).restore(kept)
    assert other.teacher.weight.tolist() == [3.0, 3.0]
    assert other.teacher.running_mean.tolist() == [4.0, 4.0]
