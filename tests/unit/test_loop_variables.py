"""What a script's own variables carry from step to step: generators are kept, all else is named."""

from __future__ import annotations

import copy
import functools
import heapq
import itertools
import random
import sys
import time
import weakref
from collections import Counter, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mt_resilient.training.data import loader_state, script_code
from mt_resilient.training.data.batches import Batches
from mt_resilient.training.data.iterator_progress import progress
from mt_resilient.training.variables import loop_variables, script_objects
from mt_resilient.training.variables.loop_variables import moved_on
from mt_resilient.training.variables.script_generators import Generators

DRAWN = random.Random(8)
NUMBER = 0
LAZY: Any = None


@pytest.fixture(autouse=True)
def script(monkeypatch: pytest.MonkeyPatch) -> None:
    """This file is the script."""
    for module in (loop_variables, script_objects, script_code, loader_state):
        monkeypatch.setattr(module, "installed", lambda file: file != __file__)
    monkeypatch.setattr(script_objects, "_PYTHONS", ("/nowhere",))


def asked(found: dict[str, Any]) -> Iterator[int]:
    """As a Session's steps."""
    found["names"] = moved_on(sys._getframe().f_back, found.get("held", ()))
    yield from range(3)


def looked() -> Generators:
    """The generators in the caller's variables, as a Session finds them when its loop begins."""
    generators = Generators()
    generators.look(sys._getframe().f_back)
    return generators


def put_back(generators: Generators, kept: Any) -> None:
    generators.restore(kept)
    generators.put_back()


def set_from_their_last_values(found: dict[str, Any]) -> None:
    global NUMBER
    count, best, hidden, mean, batch = 0, None, torch.zeros(2), 0.0, torch.ones(2)
    for step in asked(found):
        count += 1 + step
        if best is None or count < best:
            best = count
        hidden = torch.tanh(hidden + step)
        mean = 0.9 * mean + 0.1 * float(hidden.sum())
        NUMBER += 1
        loss = batch.sum()  # of a batch that is read ahead
        batch = torch.ones(2) * loss


def enumerated(found: dict[str, Any]) -> None:
    total = 0.0
    for at, step in enumerate(asked(found)):
        total += at * step


def enumerated_in_vain(found: dict[str, Any]) -> None:
    for at, step in enumerate(asked(found), 1):  # noqa: B007
        print(step, *(number for number, _ in enumerate([step])))


def logged(steps: Iterator[int], every: int) -> Iterator[int]:
    """As many scripts log every so often."""
    printed = 0
    for step in steps:
        yield step
        printed += step % every == 0


def in_a_generator(found: dict[str, Any]) -> None:
    iteration, best, seen = 0, {"acc": 0.0}, [0]
    found["held"] = [best]
    for at, (step, _) in enumerate(zip(logged(asked(found), every=2), range(9), strict=False)):
        iteration += 1
        best["acc"] = step
        seen = [step]
        print(at)
    while iteration:
        iteration -= len(seen)


def nothing(found: dict[str, Any]) -> None:
    loss, began_s, rest = 0, time.perf_counter(), iter(range(9))
    for step in asked(found):
        loss = step * 2
        loss = loss + 1
        took = [loss + 1 for loss in range(3)]
        now_s = time.perf_counter()
        spent_s, began_s = now_s - began_s, now_s
        next(rest)
        rest = iter(range(9))
        del took, spent_s


class Meter:
    def __init__(self) -> None:
        self.sum = self.last = 0.0
        self.rows: list[float] = []
        self.flag = False

    def update(self, value: float) -> None:
        self.sum += value

    def show(self, value: float) -> None:
        self.last = value

    def reset(self) -> None:
        self.sum = 0.0


class CsvLogger(Meter):
    pass


class Module(torch.nn.Linear):
    pass


def on_a_condition(found: dict[str, Any]) -> None:
    total, flag, since, teacher = 0.0, False, 0, torch.nn.Linear(2, 2)
    for step in asked(found):
        if step % 20 == 0:
            total = 0.0
            teacher = copy.deepcopy(teacher)
        total += step
        if step == 25:
            flag = True
        since = 0 if step % 2 else since + 1
        print(flag, teacher.weight.sum())


def under_one_condition(found: dict[str, Any]) -> None:
    shown, either, seen, inner = 0, 0, 0, None
    for step in asked(found):
        if step % 10 == 0:
            shown = step
            print(shown)
        if step % 3 == 0:
            either = 1
        elif step % 3 == 1:
            either = 2
        else:
            continue
        with torch.no_grad():
            seen = either
        for each in range(3):
            inner = each
        while step > 5 and seen:
            seen = 0
        print(seen, inner, either if step else seen)


LONG_BODY = f"""
def in_a_long_body(found):
    count = late = 0
    for step in asked(found):
        if step % 7 == 0:
            late = 1
        for at in range(12):
            numbers = [{", ".join(f"at + {number}" for number in range(99))}]
            some = [each * 2 if each % 2 else each * 3 for each in numbers if each % 5 and each % 7]
        count += len(numbers)
        print(late, some)
"""


def in_a_long_body(found: dict[str, Any]) -> None:
    """With jumps over more than 255 instructions, which have a prefix in byte code."""
    made: dict[str, Any] = {}
    exec(compile(LONG_BODY, __file__, "exec"), globals(), made)
    made["in_a_long_body"](found)


def in_place(found: dict[str, Any]) -> None:
    rows, box, numbers, recent = [], [0], {"n": 0}, deque(maxlen=3)
    sums, seen, kinds, rebound = defaultdict(float), set(), Counter(), []
    ones, average, nested, table = np.zeros(3), torch.zeros(3), {"loss": [0.0]}, {}
    for step in asked(found):
        rows.append(step)
        box[0] += 1
        numbers["n"] += 1
        recent.append(step)
        sums[f"{step}"] += step if step else 1.0
        seen.add(step)
        kinds.update([step])
        rebound = rebound + rows
        ones += 1
        average.mul_(0.9).add_(torch.ones(3), alpha=0.1)
        nested["loss"].append(step)
        table[step] = [each + 1 for each in rows]


def of_objects(found: dict[str, Any]) -> None:
    meter, space, shown, best = Meter(), SimpleNamespace(k=0, last=0), Meter(), {"acc": 0.0}
    for step in asked(found):
        meter.update(step)
        meter.rows.append(step)
        space.k += 1
        space.last = step
        shown.show(step)
        if step == 1:
            shown.flag = True
        if step > best["acc"]:
            best["acc"] = step


def made_anew_in_place(found: dict[str, Any]) -> None:
    model, log, buffer, row, meter, logs = Module(2, 2), CsvLogger(), torch.zeros(2), {}, Meter(), {}
    weight, writer, bar = torch.zeros(2, requires_grad=True), None, None
    groups = [{"lr": 0.1}]
    found["held"] = [SimpleNamespace(groups=groups)]
    for step in asked(found):
        model.weight.data.mul_(0.9)
        model.train()
        log.update(step)
        log.rows.append(step)
        buffer.zero_()
        buffer.add_(step)
        buffer[:] = step
        row = {}
        row["step"] = step
        meter.reset()
        meter.update(step)
        logs["loss"] = step
        weight.data.add_(1)
        names = []
        names.append(step)
        groups[0]["lr"] *= 0.5
        writer = writer or CsvLogger()
        bar = bar or CsvLogger()


CALLS = UNCALLED = SET = 0
HISTORY: list[float] = []
COUNTER = itertools.count()
HEAP: list[float] = []
LIMITS = {"most": 3}


class Stats:
    total = 0

    def note(self) -> None:
        Stats.total += 1


def warmup() -> float:
    global CALLS
    CALLS += 1
    return min(1.0, CALLS / LIMITS["most"])


@torch.no_grad()
def remembered(loss: float) -> None:
    global SET
    SET = int(loss)
    HISTORY.append(loss)


def uncalled() -> None:
    global UNCALLED
    UNCALLED += 1


def rate() -> float:
    """It calls the one that counts."""
    return 0.1 * warmup()


class Counting(torch.nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * next(COUNTER)


class Trainer:
    def __init__(self) -> None:
        self.steps, self.stats, self.kept = 0, Stats(), {"n": 0}

    def step(self) -> None:
        self._count()
        self.stats.note()

    def keep(self) -> None:
        self.kept["n"] += 1

    def _count(self) -> None:
        self.steps += 1


def by_what_it_calls(found: dict[str, Any]) -> None:
    inner = 0

    def nested() -> None:
        nonlocal inner
        inner += 1

    trainer, keeping, push = Trainer(), Trainer(), functools.partial(heapq.heappush, HEAP)
    model, calls = torch.nn.Sequential(Counting(1, 1)), [uncalled]
    found["held"] = [keeping.kept]
    for step in asked(found):
        print(rate(), model(torch.zeros(1)), calls, push)
        remembered(step)
        heapq.heappush(HEAP, step)
        each = sorted([step], key=lambda _: nested())
        trainer.step()
        keeping.keep()
        del each


def by_functions_of_all_kinds(found: dict[str, Any]) -> None:
    counts, box, meter = {"n": 0}, SimpleNamespace(n=0), Meter()

    def deeper() -> None:
        def inner() -> None:
            counts["n"] += 1

        inner()

    def with_a_default(value: int, *, rows: list[int] = [], fresh: Any = None) -> None:  # noqa: B006
        fresh = [value]
        fresh.append(value)
        rows.append(value)

    def itself() -> None:
        itself.calls += 1  # type: ignore[attr-defined]

    def of_an_object() -> None:
        box.n += 1
        meter.update(1.0)

    itself.calls = 0  # type: ignore[attr-defined]
    holder, model = Trainer(), Module(1, 1)
    holder.hook, holder.partial = of_an_object, functools.partial(with_a_default, 3)  # type: ignore[attr-defined]
    model.told = lambda: [counts.update(n=0)]
    for _ in asked(found):
        deeper()
        itself()
        holder.hook()  # type: ignore[attr-defined]
        holder.partial()  # type: ignore[attr-defined]
        model.told()


def schedule() -> Iterator[float]:
    yield from (1 / step for step in range(1, 100))


def by_counters(found: dict[str, Any]) -> None:
    rates, numbers, batches = schedule(), itertools.count(), iter(torch.utils.data.DataLoader([1, 2, 3]))
    for _ in asked(found):
        print(next(rates), next(numbers), next(batches))


def held(found: dict[str, Any]) -> None:
    best, given, hidden = {"acc": 0.0}, torch.zeros(2), torch.zeros(2)
    rows: list[int] = []
    found["held"] = [{"best": best, "rows": rows}, given, hidden]
    for step in asked(found):
        best["acc"] = max(best["acc"], step)
        rows.append(step)
        given += 1
        hidden = hidden + 1


class Loop:
    def __init__(self) -> None:
        self.global_step, self.loss, self.best, self.history = 0, 0.0, None, [0.0]
        self.model, self.state = torch.nn.Linear(2, 2), {"n": 0}

    def run(self, found: dict[str, Any]) -> None:
        found["held"] = [self.model, self.state]
        for step in asked(found):
            self.loss = step * 2.0
            self.global_step += 1
            if self.best is None or self.loss < self.best:
                self.best = self.loss
            self.history.append(self.loss)
            self.state["n"] += 1
            self.model.train()


class Runner:
    """With a part in the loader: what the loader's data saves are its plain attributes and short lists, but not its models."""

    def __init__(self) -> None:
        self.seen, self.rows, self.model = 0, [0], torch.nn.Linear(2, 2)
        self.average = torch.zeros(100_000)
        self.teacher = copy.deepcopy(self.model)

    def collate(self, rows: Any) -> Any:
        self.seen += len(rows)
        return rows

    def batches(self) -> Iterator[Any]:
        self.rows.append(0)
        yield from range(9)

    def smooth(self) -> None:
        self.average.mul_(0.9)

    def run(self, found: dict[str, Any], loader: Any, begin_epoch: Any) -> None:
        found["held"] = [self.model, Batches(loader, 1, 1, begin_epoch)]
        for _ in asked(found):
            self.seen += 1
            self.rows.append(1)
            self.smooth()
            if self.seen % 2:
                self.teacher = copy.deepcopy(self.model)
            print(self.teacher.weight)


def collated(found: dict[str, Any]) -> None:
    runner = Runner()
    runner.run(found, torch.utils.data.DataLoader([1, 2], collate_fn=runner.collate), None)


def begun(found: dict[str, Any]) -> None:
    runner = Runner()
    runner.run(found, [1, 2], lambda epoch: runner.collate([epoch]))


def generated(found: dict[str, Any]) -> None:
    runner = Runner()
    runner.run(found, lambda: runner.batches(), None)


def no_loop(found: dict[str, Any]) -> None:
    count = 0
    steps = asked(found)
    while next(steps, None) is not None:
        count += 1


@pytest.mark.parametrize(
    ("loop", "names"),
    [
        (set_from_their_last_values, "count best hidden mean NUMBER batch"),
        (enumerated, "total at"),
        (enumerated_in_vain, ""),
        (in_a_generator, "printed iteration at"),
        (nothing, ""),
        (no_loop, ""),
        (on_a_condition, "teacher total since flag"),
        (under_one_condition, ""),
        (in_a_long_body, "count late"),
        (in_place, "rows box numbers recent sums seen kinds rebound ones average nested table"),
        (of_objects, "meter meter.rows space.k shown.flag best"),
        (made_anew_in_place, ""),
        (by_what_it_calls, "HEAP trainer COUNTER HISTORY inner CALLS Stats.total"),
        (by_functions_of_all_kinds, "counts itself.calls box.n meter rows"),
        (by_counters, "rates numbers"),
        (held, "hidden"),
        (collated, "self self.teacher"),
        (begun, "self self.teacher"),
        (generated, "self self.teacher"),
        (Loop().run, "self.global_step self.best self.history"),
    ],
)
def test_variables_that_a_loop_carries_from_step_to_step_are_named(loop: Any, names: str) -> None:
    found: dict[str, Any] = {}
    loop(found)
    assert found["names"] == names.split()


def test_generators_in_variables_come_back() -> None:
    numpys, torchs = np.random.default_rng(1), torch.Generator().manual_seed(2)
    inner = SimpleNamespace(own=random.Random(4))

    def draw() -> list[float]:
        drawn = [numpys.random(), float(torch.rand(1, generator=torchs)), DRAWN.random()]
        return [*drawn, inner.own.random()]

    generators = looked()
    draw()
    kept = generators.collect()
    expected = draw()
    generators.restore(kept)
    assert draw() != expected  # the data may draw on its way back
    assert generators.collect() is kept, "a snapshot taken now holds the restored state"
    generators.put_back()
    assert draw() == expected


def test_the_ranks_own_generators_and_those_of_other_classes_are_left_alone() -> None:
    class Bits(np.random.PCG64):
        pass

    everybodys, mine, system = torch.default_generator, np.random.Generator(Bits(3)), random.SystemRandom()
    alias, drawing = random.random, np.random.rand
    generators = looked()
    before = mine.bit_generator.state
    generators.restore(generators.collect())
    mine.random()
    torch.rand(1)
    drawn = everybodys.get_state(), alias.__self__.getstate(), drawing.__self__.get_state()[2]
    generators.put_back()
    assert mine.bit_generator.state != before
    assert torch.equal(everybodys.get_state(), drawn[0])
    assert alias.__self__.getstate() == drawn[1]
    assert drawing.__self__.get_state()[2] == drawn[2]
    assert 0 <= system.random() < 1


class Odd(type):
    def __getattr__(cls, name: str) -> Any:
        raise KeyError(name)


class OfAnOddClass(metaclass=Odd):
    pass


class Level(Enum):
    HIGH = 1


class OwnParameters(torch.nn.Module):
    def parameters(self) -> Any:  # type: ignore[override]
        return [1]


class Unhashed(ModuleType):
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    __file__ = 3  # type: ignore[assignment]


def test_no_odd_object_in_a_variable_harms_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = [OfAnOddClass(), OwnParameters(), weakref.proxy(Mine(1)), Unhashed("odd"), DRAWN]
    monkeypatch.setitem(sys.modules, "attrdict", {"__file__": __file__})  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "odd", Unhashed("odd"))
    generators = looked()
    found: dict[str, Any] = {}
    for _ in asked(found):
        print([type(each) for each in odd])
        DRAWN.random()
    assert found["names"] == []
    assert generators.collect()


class Mine(random.Random):
    pass


class OfTheClass:
    rng = np.random.default_rng(1)


class Slots:
    __slots__ = ("rng",)

    def __init__(self) -> None:
        self.rng = random.Random(2)


def noise(rng: Any = random.Random(5), *, other: Any = random.Random(6)) -> float:  # noqa: B008
    return float(rng.random() + other.random())


@functools.lru_cache
def cached(rng: Any = random.Random(7)) -> Any:  # noqa: B008
    return rng


def drawn_with(rng: Any) -> float:
    return float(rng.random())


def closing(rng: Any) -> Callable[[], float]:
    def draw() -> float:
        return float(rng.random())

    return draw


Pair = namedtuple("Pair", "rng other")
PLACES: dict[str, Callable[[], tuple[Any, Callable[[], float]]]] = {
    "dict": lambda: (held := {"a": random.Random(1)}, lambda: held["a"].random()),
    "list": lambda: (held := [random.Random(1)], lambda: held[0].random()),
    "key of an Enum": lambda: (held := {Level.HIGH: random.Random(1)}, lambda: held[Level.HIGH].random()),
    "key of two": lambda: (held := {("a", 1): random.Random(1)}, lambda: held["a", 1].random()),
    "deque": lambda: (held := deque([random.Random(1)]), lambda: held[0].random()),
    "namedtuple": lambda: (held := Pair(random.Random(1), 2), lambda: held.rng.random()),
    "attribute of an attribute": lambda: (
        held := SimpleNamespace(aug=SimpleNamespace(rng=random.Random(1))),
        lambda: held.aug.rng.random(),
    ),
    "dict of an attribute": lambda: (
        held := SimpleNamespace(all={"a": [random.Random(1)]}),
        lambda: held.all["a"][0].random(),
    ),
    "class attribute": lambda: (OfTheClass, OfTheClass.rng.random),
    "class attribute of an object": lambda: (OfTheClass(), OfTheClass.rng.random),
    "slots": lambda: (held := Slots(), lambda: held.rng.random()),
    "default argument": lambda: (noise, noise),
    "behind a decorator": lambda: (cached, lambda: cached().random()),
    "closure": lambda: (held := closing(random.Random(3)), held),
    "partial": lambda: (held := functools.partial(drawn_with, random.Random(3)), held),
    "partial by name": lambda: (held := functools.partial(drawn_with, rng=random.Random(3)), held),
    "bound method": lambda: (held := np.random.default_rng(3).random, held),
    "bound method of python's": lambda: (held := random.Random(14).random, held),
    "bound method of an object": lambda: (held := SimpleNamespace(f=Slots().rng.random), lambda: held.f()),
    "subclass": lambda: (held := Mine(3), lambda: held.random()),
    "subclass within": lambda: (held := [Mine(3)], lambda: held[0].random()),
}


@pytest.mark.parametrize("place", PLACES)
def test_generators_inside_the_variables_objects_come_back(place: str) -> None:
    variable, draw = PLACES[place]()
    generators = looked()
    draw()
    kept = generators.collect()
    expected = draw(), draw()
    put_back(generators, kept)
    assert (draw(), draw()) == expected
    del variable


def test_a_generator_that_is_made_anew_is_the_one_that_is_kept() -> None:
    rng, other, inner = np.random.default_rng(0), random.Random(1), SimpleNamespace(rng=np.random.default_rng(0))
    generators = looked()
    rng, inner.rng, other = np.random.default_rng(1), np.random.default_rng(2), random.Random(2)
    kept = generators.collect()
    expected = rng.random(), inner.rng.random(), other.random()
    rng, inner.rng, other = np.random.default_rng(3), np.random.default_rng(4), random.Random(5)
    put_back(generators, kept)
    assert (rng.random(), inner.rng.random(), other.random()) == expected


def test_in_a_new_life_the_first_generator_of_a_name_gets_what_its_last_one_had() -> None:
    def life(kept: Any) -> Any:
        rng = np.random.default_rng(0)
        generators = looked()
        if kept is None:
            rng = np.random.default_rng(7)
            return generators.collect(), rng.random()
        put_back(generators, kept)
        return rng.random()

    kept, expected = life(None)
    assert life(kept) == expected


def test_a_generator_that_is_made_later_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[__name__]
    monkeypatch.setattr(module, "LAZY", None)
    held = SimpleNamespace(rng=None)
    generators = looked()
    monkeypatch.setattr(module, "LAZY", np.random.default_rng(5))
    monkeypatch.setattr(module, "NEW", random.Random(6), raising=False)
    held.rng, held.other = random.Random(7), random.Random(8)
    mine = random.Random(9)
    kept = generators.collect()
    expected = [each.random() for each in (LAZY, vars(module)["NEW"], held.rng, held.other, mine)]
    put_back(generators, kept)
    assert [each.random() for each in (LAZY, vars(module)["NEW"], held.rng, held.other, mine)] == expected
    monkeypatch.setattr(module, "LAZY", None)
    monkeypatch.delattr(module, "NEW")
    held = SimpleNamespace(rng=None)
    put_back(looked(), kept)
    assert [each.random() for each in (LAZY, vars(module)["NEW"], held.rng, held.other)] == expected[:4]


def test_the_look_is_bounded() -> None:
    many = [random.Random(seed) for seed in range(200)]
    long = [random.Random(seed) for seed in range(300)]
    generators = looked()
    before = many[0].getstate(), long[0].getstate(), many[150].getstate()
    kept = generators.collect()
    for each in (*many, *long):
        each.random()
    put_back(generators, kept)
    assert many[0].getstate() == before[0]
    assert long[0].getstate() != before[1]
    assert many[150].getstate() != before[2]


def test_nothing_is_kept_alive_by_the_look() -> None:
    held = torch.ones(3)
    gone = weakref.ref(held)
    generators = looked()
    for _ in asked({}):
        break
    del held
    assert gone() is None
    assert generators.collect()


def test_the_mapping_that_locals_returned_to_the_script_stays_as_it_was() -> None:
    rate, held = 0.1, torch.ones(3)
    config = locals()
    before, gone = dict(config), weakref.ref(config.pop("held"))
    del before["held"]
    rate, later = 0.2, torch.ones(3)
    later_gone = weakref.ref(later)
    generators = looked()
    for _ in asked({}):
        break
    assert generators.collect()
    del held, later
    assert (gone(), later_gone()) == (None, None)
    assert (config, rate) == (before, 0.2)


def test_what_a_generator_of_the_script_drops_is_not_kept_alive_by_the_look() -> None:
    gone: list[weakref.ref[torch.Tensor]] = []

    def numbers() -> Iterator[int]:
        held, at, fixed = torch.ones(3), 0, lambda: at
        gone.append(weakref.ref(held))
        while True:
            yield at
            held, at = None, fixed() + 1  # type: ignore[assignment]

    iterator = numbers()
    next(iterator)
    assert loop_variables._counts(iterator)
    first = progress(iterator)
    assert first == progress(iterator)
    next(iterator)
    assert gone[0]() is None
    second = progress(iterator)
    next(iterator)
    assert len({repr(each) for each in (first, second, progress(iterator))}) == 3
