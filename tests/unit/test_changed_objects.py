"""Objects that the script's loop changes in place, and that no snapshot holds, are named after some steps; healthy ones are not."""

from __future__ import annotations

import copy
import functools
import itertools
import random
import sys
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from mt_resilient.training.data import script_code
from mt_resilient.training.data.batches import Batches
from mt_resilient.training.variables import changed_objects, script_objects
from mt_resilient.training.variables.changed_objects import ChangedObjects, sentence


@pytest.fixture(autouse=True)
def script(monkeypatch: pytest.MonkeyPatch) -> None:
    """This file is the script."""
    for module in (script_objects, script_code):
        monkeypatch.setattr(module, "installed", lambda file: file != __file__)
    monkeypatch.setattr(script_objects, "_PYTHONS", ("/nowhere",))


def steps(
    number: int, logs: list[list[str]], *held: Any, named: tuple[str, ...] = (), epoch: int = sys.maxsize
) -> Iterator[int]:
    """epoch: the number of steps in an epoch."""
    changed = ChangedObjects()
    for step in range(number):
        yield step
        logs.append(changed.stepped(sys._getframe(), held, named, step // epoch))


class Average:
    """Of the weights, as most people write it."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: each.detach().clone() for name, each in model.named_parameters()}
        self.decay, self.updates, self.last = 0.9, 0, 0.0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.updates += 1
        self.last = float(self.updates)
        for name, each in model.named_parameters():
            self.shadow[name].data.mul_(self.decay).add_(each.data, alpha=1 - self.decay)


class Holder:
    def __init__(self) -> None:
        self.meters = defaultdict(list)  # type: ignore[var-annotated]
        self.model = nn.Linear(2, 2)
        self.total = self.shown = 0.0
        self.count = itertools.count()


class Counts(Holder):
    def note(self, value: float) -> None:
        self.total += value
        self.shown = value


class Added(Counts):
    def note(self, value: float) -> None:
        super().note(value)
        next(self.count)


class Slotted:
    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows = [0.0]


class Environment:
    """Of a package, as the test below has it."""

    def __init__(self) -> None:
        self.place, self.rng = np.zeros(3), [1]


def trained(model: nn.Linear, value: float) -> None:
    with torch.no_grad():
        model.weight.add_(value)


KINDS: dict[str, Callable[[nn.Linear], tuple[Any, Callable[[], Any]]]] = {
    "teacher": lambda model: (teacher := copy.deepcopy(model), lambda: trained(teacher, 0.1)),
    "average of torch": lambda model: (average := AveragedModel(model), lambda: average.update_parameters(model)),
    "list of tensors": lambda model: (held := [torch.zeros(2)], lambda: held[0].data.add_(1)),
    "array": lambda model: (held := np.zeros((3, 3)), lambda: np.add(held, 1, out=held)),
    "long array": lambda model: (held := np.zeros(100_000), lambda: np.add(held, 1, out=held)),
    "tensor in part": lambda model: (held := torch.zeros(100_000), lambda: held[5:6].add_(1)),
    "meters": lambda model: (held := [Slotted(), Slotted()], lambda: held[1].rows.append(1.0)),
    "long deque": lambda model: (held := deque(range(9000), 9000), lambda: held.append(3)),
    "set": lambda model: (held := {0}, lambda: held.add(len(held))),
    "mapping": lambda model: (held := {"a": {"b": [1.0]}}, lambda: held["a"]["b"].append(2.0)),
    "namespace": lambda model: (held := SimpleNamespace(n=[0]), lambda: held.n.append(1)),
    "optimizer": lambda model: (
        held := torch.optim.Adam([nn.Parameter(torch.ones(2))]),
        lambda: (held.param_groups[0]["params"][0].grad is None, held.state.update({len(held.state): 1})),
    ),
    "schedule": lambda model: (
        held := torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=0.1), 2),
        held.step,
    ),
    "counter": lambda model: (held := itertools.count(), lambda: next(held)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_that_changes_in_a_variable_is_named_once(kind: str) -> None:
    model, logs = nn.Linear(2, 2), []  # type: ignore[var-annotated]
    thing, change = KINDS[kind](model)
    for _ in steps(12, logs, model):
        trained(model, 0.01)
        change()
    assert (logs[2], sum(map(len, logs))) == (["thing.n" if kind == "namespace" else "thing"], 1)
    del thing


def test_attributes_of_an_object_are_told_apart() -> None:
    model, logs = nn.Linear(2, 2), []  # type: ignore[var-annotated]
    average, holder, added = Average(model), Holder(), Added()
    for step in steps(4, logs, model):
        trained(model, 0.01)
        average.update(model)
        holder.meters["loss"].append(step)
        holder.shown = step
        added.note(step)
    assert logs[2] == ["average.shadow", "average.updates", "holder.meters", "added.total", "added.count"]


def test_a_change_that_begins_later_is_named_at_the_next_comparison() -> None:
    logs: list[list[str]] = []
    rows: dict[str, int] = {}
    for step in steps(101, logs):
        if step == 60:
            rows["late"] = step
    assert [at for at, names in enumerate(logs, 1) if names] == [100]
    assert logs[99] == ["rows"]


@pytest.mark.parametrize(("first", "told"), [(900, 1000), (5000, 10_000), (50_000, 100_000)])
def test_an_object_that_seldom_changes_is_named(first: int, told: int) -> None:
    changed, target, logs = ChangedObjects(), nn.Linear(2, 2), []  # type: ignore[var-annotated]
    for step in range(1, 100_003):
        if step == first:
            trained(target, 0.1)
        if names := changed.stepped(sys._getframe(), [], []):
            logs.append((step, names))
    assert logs == [(told, ["target"])]


def test_what_changes_only_at_the_end_of_an_epoch_is_named_in_the_next_one() -> None:
    logs: list[list[str]] = []
    average, third, fourth = nn.Linear(2, 2), {"n": 0}, {"n": 0}
    for step in steps(92, logs, epoch=20):
        if step == 19:
            trained(average, 0.1)
        third["n"] += step == 59
        fourth["n"] += step == 79
    assert {at: names for at, names in enumerate(logs) if names} == {20: ["average"], 60: ["third"]}


class Trainer:
    """With parts in the loader."""

    def __init__(self) -> None:
        self.model, self.teacher = nn.Linear(2, 2), nn.Linear(2, 2)
        self.sampler, self.count, self.rows, self.large = [3], 0, [0], torch.zeros(100_000)
        self.optimizer = torch.optim.Adam(self.teacher.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)

    def collate(self, rows: Any) -> Any:
        return rows

    def batches(self) -> Iterator[Any]:
        yield from self.sampler


LOADERS: dict[str, Callable[[Trainer], tuple[Any, Any]]] = {
    "collate_fn": lambda trainer: (torch.utils.data.DataLoader([1], collate_fn=trainer.collate), None),
    "begin_epoch": lambda trainer: ([1], lambda epoch: trainer.sampler.append(epoch)),
    "generator": lambda trainer: (lambda: trainer.batches(), None),
    "partial": lambda trainer: ([1], functools.partial(Trainer.collate, trainer)),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_of_a_trainer_in_the_loader_only_what_its_data_save_is_left_out(kind: str) -> None:
    logs: list[list[str]] = []
    trainer = Trainer()
    loader, begin_epoch = LOADERS[kind](trainer)
    around, data = [trainer], Batches(loader, 1, 1, begin_epoch)
    for _ in steps(3, logs, trainer.model, data):
        trained(trainer.model, 0.1)
        trained(trainer.teacher, 0.1)
        trainer.schedule.step()
        trainer.large.add_(1)
        trainer.count += 1
        trainer.rows.append(1)
        trainer.sampler.append(1)
    names = ["trainer.teacher", "trainer.large", "trainer.optimizer", "trainer.schedule", "around"]
    assert sorted(logs[2]) == sorted(names)
    del around


def test_what_the_loader_s_data_save_of_a_trainer_is_not_named() -> None:
    logs: list[list[str]] = []
    trainer = Trainer()
    around, data = [trainer], Batches([1], 1, 1, lambda epoch: trainer.sampler.append(epoch))
    for _ in steps(3, logs, data):
        trainer.count += 1
        trainer.rows.append(1)
    assert logs == [[]] * 3
    del around


NAMES: dict[str, Callable[[], Any]] = {
    "log_alpha": lambda: torch.zeros(()),
    "x_bar": lambda: torch.zeros(3),
    "weights_bar": lambda: {"w": torch.zeros(3)},
    "log_scale": lambda: nn.Linear(1, 1),
    "log_of_losses": lambda: [torch.zeros(())],
    "log": lambda: {"loss": [0.0]},
    "pbar": lambda: SimpleNamespace(n=0),
}


def test_a_tensor_or_a_module_is_no_display_whatever_its_name() -> None:
    shown = {name for name, make in NAMES.items() if script_objects.for_the_eye(name, make())}
    assert shown == {"log_of_losses", "log", "pbar"}


def test_a_change_in_an_object_of_a_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Environment, "__module__", "gymnasium.environment")
    envs, logs = [Environment()], []  # type: ignore[var-annotated]
    for _ in steps(3, logs):
        envs[0].place += 1
    assert logs[2] == ["envs"]


class Trap:
    """Code of the script's that nobody is to call."""

    def __getattr__(self, name: str) -> Any:
        raise SystemExit("called")

    def __getitem__(self, key: Any) -> Any:
        raise SystemExit("called")

    __iter__ = __len__ = __repr__ = __hash__ = __getitem__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise SystemExit("called")

    @property
    def __class__(self) -> Any:
        raise SystemExit("called")

    @property
    def loud(self) -> Any:
        raise SystemExit("called")


class TrapList(list):  # type: ignore[type-arg]
    __iter__ = __len__ = __getitem__ = Trap.__getitem__  # type: ignore[assignment]


class TrapDict(dict):  # type: ignore[type-arg]
    __iter__ = __len__ = __getitem__ = items = values = keys = Trap.__getitem__  # type: ignore[assignment]


class Parameters(nn.Module):
    def parameters(self) -> Any:  # type: ignore[override]
        raise SystemExit("called")

    def modules(self) -> Any:
        raise SystemExit("called")


def test_what_does_not_change_or_is_known_is_not_named_and_no_code_is_called() -> None:
    model, logs = nn.Linear(2, 2), []  # type: ignore[var-annotated]
    optimizer = torch.optim.Adam(model.parameters())
    parameters, flat, view = [*model.parameters()], model.weight.detach().view(-1), {"w": model.weight.data}
    wrapped, held, kept = nn.Sequential(model), {"best": [1.0]}, [torch.zeros(2)]
    generator, logger, pbar, rest = random.Random(1), [0], [0], iter(range(9))
    data = torch.utils.data.TensorDataset(torch.zeros(3))
    traps = [Trap(), TrapList([1]), TrapDict(a=1), Parameters()]
    nan, constant, loss, batch = [float("nan")], {"lr": 0.1}, 0.0, torch.zeros(2)
    for step in steps(12, logs, model, optimizer, held, kept):
        batch = torch.full((2,), float(step))
        model(batch).sum().backward()
        optimizer.step()
        loss = step * 2.0
        held["best"].append(loss)
        kept[0].add_(1)
        generator.random()
        logger.append(1)
        pbar.append(1)
        next(rest, None)
        data.tensors[0].add_(1)
    assert logs == [[]] * 12
    del parameters, flat, view, wrapped, traps, nan, constant, batch


class Rebinding:
    def __init__(self) -> None:
        self.outputs: list[int] = []
        self.rows: dict[str, int] = {}

    def step(self, number: int) -> None:
        self.outputs = [number]
        self.rows["n"] = number


def test_what_the_loop_binds_anew_is_not_named_and_nothing_is_kept_alive() -> None:
    model, logs, gone = nn.Linear(2, 2), [], []  # type: ignore[var-annotated]
    trainer, average = Rebinding(), torch.zeros(2)
    outputs, row, loss = [0], {"a": 1}, torch.zeros(())
    for step in steps(12, logs, model):
        loss = model(torch.full((2,), float(step))).sum()
        outputs, row = [step, loss], {"a": step}
        average = average * 0.9 + step
        trainer.step(step)
        gone.append(weakref.ref(loss))
    del outputs, row, loss
    assert logs[2] == ["gone", "trainer.rows"]
    assert [each() for each in gone] == [None] * 12
    del average


def test_a_look_takes_no_more_than_its_time() -> None:
    logs: list[list[str]] = []
    many = [SimpleNamespace(rows=[[*range(256)] for _ in range(200)]) for _ in range(400)]
    began = time.process_time()
    for _ in steps(3, logs):
        many[0].rows[0][0] += 1
    assert time.process_time() - began < 10
    assert set(logs[2]) <= {"many"}


def test_a_dataset_s_list_of_samples_is_not_searched() -> None:
    """With 400,000 samples, the rank was silent for 4 s after a step."""
    logs: list[list[str]] = []
    call_log = []
    samples, rows, mixes = [(f"{at}.jpg", at) for at in range(20_000)], [0], Average(nn.Linear(2, 2))
    data = Batches([SimpleNamespace(samples=samples, mixes=mixes)], None, 1, None)
    sys.setprofile(lambda frame, event, _: call_log.append(frame.f_code) if event == "call" else None)
    for step in steps(3, logs, data):
        rows.append(step)
        mixes.updates += 1
    sys.setprofile(None)
    assert logs[2] == ["rows"]
    assert len(call_log) < 100_000


def test_names_that_were_said_before_are_left_out() -> None:
    logs: list[list[str]] = []
    rows, holder = [0], Holder()
    for _ in steps(12, logs, named=("rows", "holder")):
        rows.append(1)
        holder.meters["a"].append(1)
    assert logs == [[]] * 12


def test_the_sentence_says_what_to_give_to_the_session() -> None:
    assert "Session(…, shadow=average.shadow)" in sentence(["average.shadow", "envs"])
    assert tuple(sorted(changed_objects._LOOKS)) == changed_objects._LOOKS


def test_a_mapped_file_is_not_read(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "tokens", np.uint8, "w+", shape=(100,))
    for array in (mapped, mapped[10:], np.asarray(mapped), np.frombuffer(memoryview(mapped), np.uint8)):
        assert changed_objects._sample(array) == b""
    assert changed_objects._sample(np.array(mapped))


def test_a_tensor_whose_memory_was_freed_is_not_read() -> None:
    """As FSDP frees gathered parameters. Reading one would end the process, so its samples would tell nothing."""
    tensor = torch.ones(1000)
    before = changed_objects._sample(tensor)
    tensor.untyped_storage().resize_(0)
    with mock.patch.object(torch.Tensor, "cpu", side_effect=AssertionError("it is read")):
        after = changed_objects._sample(tensor)
    assert before.startswith(after)
