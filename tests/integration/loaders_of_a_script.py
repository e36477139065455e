"""Loaders as people write them, which move on with what is no number, list or array that is there when the loop begins. A test copies this
file to where it counts as a script, and imports it there. Each factory of `FACTORIES` gives a loader in its first state."""

from __future__ import annotations

import argparse
import ctypes
import itertools
import multiprocessing
import os
import random
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

SAMPLES = 14


def order(by: Any) -> Iterator[int]:
    return iter(random.Random(by).sample(range(SAMPLES), SAMPLES))


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, transform: Any = None) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = torch.tensor([float(index)], dtype=torch.float64)
        return sample if self.transform is None else self.transform(sample)


class Order(Sampler[int]):
    """Its subclasses say how it moves on."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return order(self.next())

    def next(self) -> Any:
        raise NotImplementedError


# -- functions ---------------------------------------------------------------------------------------------------------------

examples: list[int] = []
times = 0


def of_a_list(things: list[Any]) -> Callable[[], Iterator[Any]]:
    def batches() -> Iterator[Any]:
        random.shuffle(things)
        yield from things

    return batches


def of_a_global_list() -> Callable[[], Iterator[Any]]:
    examples[:] = range(7)

    def batches() -> Iterator[Any]:
        random.shuffle(examples)
        yield from examples

    return batches


def of_a_nonlocal_count() -> Callable[[], Iterator[Any]]:
    count = 0

    def batches() -> Iterator[Any]:
        nonlocal count
        count += 1
        return order(count)

    return batches


def of_a_global_count() -> Callable[[], Iterator[Any]]:
    global times
    times = 0

    def batches() -> Iterator[Any]:
        global times
        times += 1
        return order(times)

    return batches


def of_a_default() -> Callable[[], Iterator[Any]]:
    def batches(noise: random.Random = random.Random(3)) -> Iterator[Any]:  # noqa: B008
        return iter(noise.sample(range(SAMPLES), SAMPLES))

    batches.__defaults__ = (random.Random(3),)
    return batches


# -- generators that are made when they are needed ------------------------------------------------------------------------------


class Reseeded(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self.noise = np.random.default_rng(0)

    def set_epoch(self, epoch: int) -> None:
        self.noise = np.random.default_rng((7, epoch))

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + self.noise.random()


class Lazy(Numbers):
    noise: np.random.Generator | None = None

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.noise is None:
            worker = get_worker_info()
            self.noise = np.random.default_rng(5 + (worker.id if worker else 0))
        return super().__getitem__(index) + self.noise.random()


# -- transforms ------------------------------------------------------------------------------------------------------------------


class Jitter(torch.nn.Module):
    """As torchvision's."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.count = torch.Generator().manual_seed(3), 0

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return sample + torch.rand((), generator=self.generator) + self.count


class Noise:
    def __init__(self) -> None:
        self.noise = np.random.default_rng(2)

    def __call__(self, sample: torch.Tensor) -> torch.Tensor:
        return sample + self.noise.random()


class Composed:
    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)

    def __call__(self, sample: torch.Tensor) -> torch.Tensor:
        for each in self.transforms:
            sample = each(sample)
        return sample


class Sample:
    def __init__(self, index: int) -> None:
        self.index, self.about = index, {"box": [index]}


class Many(Numbers):
    def __init__(self) -> None:
        self.samples = [Sample(index) for index in range(150)]
        super().__init__(Composed(Noise()))


class Records(Order):
    """Objects that nobody can take apart, in an order."""

    def __init__(self) -> None:
        self.records = [(lambda at=at: at) for at in range(SAMPLES)]

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.records)
        return (record() for record in self.records)


class Mixed(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self.last: deque[torch.Tensor] = deque(maxlen=3)

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = super().__getitem__(index)
        mixed = sample + sum(self.last)
        self.last.append(sample)
        return mixed


# -- samplers ------------------------------------------------------------------------------------------------------------------


class Slots(Order):
    __slots__ = ("times",)

    def __init__(self) -> None:
        self.times = 0

    def next(self) -> Any:
        self.times += 1
        return self.times


@dataclass
class Count:
    times: int = 0


@dataclass(slots=True)
class SlottedCount:
    times: int = 0


class Counting(Order):
    def __init__(self, state: Any) -> None:
        self.state = state

    def next(self) -> Any:
        self.state.times += 1
        return int(self.state.times)


class OfItsClass(Order):
    times = 0

    def __init__(self) -> None:
        type(self).times = 0

    def next(self) -> Any:
        type(self).times += 1
        return self.times


class Phase(Enum):
    EASY, HARD = "easy", "hard"


class Turning(Order):
    """Takes turns with the values that it has."""

    def __init__(self, *values: Any) -> None:
        self.values, self.value = values, values[0]

    def next(self) -> Any:
        self.value = self.values[(self.values.index(self.value) + 1) % len(self.values)]
        return str(self.value)


class Ordered(Order):
    """Has an order, and makes the next one of it."""

    def __init__(self, first: Any, following: Callable[[Any], Any]) -> None:
        self.order, self.following = first, following

    def __iter__(self) -> Iterator[int]:
        self.order = self.following(self.order)
        return (int(index) for index in self.order)


class Weights(Order):
    """What was taken becomes less likely."""

    def __init__(self) -> None:
        self.weights = torch.ones(SAMPLES)

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            at = int(torch.multinomial(self.weights, 1))
            self.weights[at] *= 0.5
            yield at


class Called(Order):
    def __init__(self, source: Any, call: Callable[[Any], Any]) -> None:
        self.source, self.call = source, call

    def next(self) -> Any:
        return self.call(self.source)


class Permuted:
    """A loader that is none of torch's."""

    def __init__(self) -> None:
        self.data = torch.arange(7.0)

    def __iter__(self) -> Iterator[float]:
        self.data = self.data[torch.randperm(7)]
        return iter(self.data.tolist())


class Endless:
    """Goes on with an iterator of its own, reads a file, maps another one, and has a large tensor."""

    def __init__(self) -> None:
        self.numbers: Iterator[int] | None = None
        self.file: Any = None
        self.large = torch.zeros(10**5)
        self.mapped: Any = None

    def __iter__(self) -> Iterator[int]:
        while True:
            if self.mapped is None:
                self.mapped = np.memmap(np.__file__, mode="r", dtype=np.uint8)
            self.file = self.file or Path(os.devnull).open(encoding="utf-8")  # noqa: SIM115
            self.numbers = self.numbers or iter(range(10**6))
            yield next(self.numbers)


class Iterating:
    """Goes on with iterators that are there from the beginning."""

    def __init__(self) -> None:
        self.made, self.still = (at for at in range(10**6)), (at for at in range(3))
        self.cycle, self.letters, self.calm = itertools.cycle("abc"), iter(["a"] * 99), itertools.cycle("abc")

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield next(self.made), next(self.cycle), next(self.letters)


def shuffled(before: list[int] | None) -> list[int]:
    now = list(range(SAMPLES)) if before is None else before
    random.shuffle(now)
    return now


def loader(dataset: Any = None, **how: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(dataset or Numbers(), batch_size=2, **how)


class Mixing:
    """A collate function with a generator of its own."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(5)

    def __call__(self, samples: list[Any]) -> torch.Tensor:
        return torch.stack([torch.tensor(sample) * self.random.random() for sample in samples])


class OnTheWay(Sampler[int]):
    """Draws bucket by bucket, from the generators that the training draws from, too."""

    def __iter__(self) -> Iterator[int]:
        for first in range(0, 12, 4):
            yield from (first + torch.randperm(4)).tolist()
            yield 12 + random.randrange(4)

    def __len__(self) -> int:
        return 15


class Epochs(DataLoader[Any]):
    """A loader that is told its epoch, and collates by that."""

    def __init__(self, **how: Any) -> None:
        self.epoch = 0
        super().__init__(range(16), collate_fn=self.mixed, **how)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def mixed(self, samples: list[int]) -> torch.Tensor:
        return torch.tensor(samples) * (self.epoch + 1)


class Stronger(Numbers):
    """Its samples depend on the epoch that it was told, and on what the loop sets at the end of each."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch, self.strength = 0, 1.0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + 100 * self.epoch + 1000 * self.strength

    def epoch_ends(self) -> None:
        self.strength += 1


class Around:
    """A loader class that goes through a DataLoader."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.dataset = inner, inner.dataset

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        yield from self.inner


class Scaling:
    """A collate function that the loop changes at the end of each epoch."""

    def __init__(self) -> None:
        self.scale = 1

    def __call__(self, samples: list[Any]) -> torch.Tensor:
        return torch.stack(samples) * self.scale

    def epoch_ends(self) -> None:
        self.scale += 1


class Shared(Numbers):
    """What the loop changes at the end of each epoch lies in memory that workers share."""

    def __init__(self) -> None:
        super().__init__()
        self.level, self.table = multiprocessing.Value("i", 1), multiprocessing.Array("d", 3)
        self.view = np.frombuffer(multiprocessing.Array("d", 2).get_obj())
        self.tensor = torch.zeros(2, dtype=torch.float64).share_memory_()
        self.count = ctypes.c_int64(0)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.count.value += 1
        seen = float(self.level.value) + self.table[1] + float(self.view[1]) + float(self.tensor[1])
        return super().__getitem__(index) + seen + 1e6 * self.count.value

    def epoch_ends(self) -> None:
        self.level.value += 10
        self.table[1] += 100.0
        self.view[1] += 1000.0
        self.tensor[1] += 10000.0


# -- what methods refer to -----------------------------------------------------------------------------------------------------


class Level:
    def __init__(self) -> None:
        self.level, self.past = 1, [1]


class Config:
    level, past = 1, [1]
    noise = np.random.default_rng(4)


class SlottedLevel:
    __slots__ = ("level",)


def counted() -> int:
    counted.times += 1  # type: ignore[attr-defined]
    return int(counted.times)  # type: ignore[attr-defined]


level, slotted, replaced = Level(), SlottedLevel(), Level()
namespace, arguments = SimpleNamespace(level=1), argparse.Namespace(level=1)
lent: Any = ModuleType("settings")
lent.__file__ = __file__
shift: Any = Level()


class Shift:
    """A transform that is a global object."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, sample: torch.Tensor) -> torch.Tensor:
        self.times += 1
        return sample + self.times


class Referring(Numbers):
    """Its samples depend on global objects, classes, a function's attribute, and a module, none of which it has itself."""

    def __init__(self) -> None:
        global level, replaced, shift
        super().__init__()
        level, replaced, shift = Level(), Level(), Shift()
        slotted.level = namespace.level = arguments.level = lent.level = Config.level = 1
        Config.noise, Config.past = np.random.default_rng(4), [1]
        counted.times = 0  # type: ignore[attr-defined]

    @property
    def sum(self) -> int:
        return level.level + 10 * slotted.level + 100 * namespace.level + 1000 * arguments.level + sum(level.past)

    @staticmethod
    def of_classes() -> float:
        return Config.level + sum(Config.past) + float(Config.noise.random())

    def __getitem__(self, index: int) -> torch.Tensor:
        seen = self.sum + self.of_classes() + counted() + lent.level * 1e5 + replaced.level * 1e6
        return shift(super().__getitem__(index)) + seen

    def epoch_ends(self) -> None:
        global replaced
        for each in (level, slotted, namespace, arguments, Config, lent):
            each.level += 1  # type: ignore[union-attr]
        for past in (level.past, Config.past):
            past.append(len(past))
        replaced = Level()
        replaced.level = 1 + level.level


class Bound(Numbers):
    """Its methods belong to generators and to a list, and it holds neither."""

    def __init__(self) -> None:
        super().__init__()
        self.noise, self.more = random.Random(3).random, np.random.RandomState(3).rand
        self.called = iter(random.Random(4).random, 2.0)
        self.left = [*range(1000)].pop

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + self.noise() + self.more() + next(self.called) + self.left()


class Lines(Numbers):
    """Each sample has the next line of a file that is open all the time."""

    def __init__(self, mode: str = "rb") -> None:
        super().__init__()
        with tempfile.NamedTemporaryFile("w") as written:
            written.writelines(f"{line}\n" for line in range(5))
            written.flush()
            self.file: Any = Path(written.name).open(mode)  # noqa: SIM115

    def __getitem__(self, index: int) -> torch.Tensor:
        if not (line := self.file.readline()):
            self.file.seek(0)
            line = self.file.readline()
        return super().__getitem__(index) + float(line)


class LinesOfAll(IterableDataset[float]):
    def __init__(self) -> None:
        self.file = Lines("r").file

    def __iter__(self) -> Iterator[float]:
        for line in self.file:
            yield float(line)
        self.file.seek(0)


class Prefetching:
    """Each epoch begins with an iterator of its own, which it holds meanwhile. One was tried before the training."""

    def __init__(self) -> None:
        self.loader = DataLoader(Numbers(), batch_size=3, shuffle=True)
        next(iter(self))

    def __iter__(self) -> Iterator[Any]:
        self.batches = iter(self.loader)
        ahead = next(self.batches, None)
        while ahead is not None:
            yield ahead
            ahead = next(self.batches, None)


class Armed:
    """As torchtext's: what it has loaded holds for the next pass. Its own state leaves its generator and its passes out."""

    def __init__(self) -> None:
        self.rng, self.at, self.passes = random.Random(1), 0, 0
        self.begun: Any = None
        self.armed = False

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return self.given()

    def given(self) -> Iterator[int]:
        if self.armed:
            self.rng.setstate(self.begun)
        else:
            self.at, self.begun = 0, self.rng.getstate()
        self.armed = False
        order = self.rng.sample(range(SAMPLES), SAMPLES)
        for at in range(5):
            if self.at <= at:
                self.at += 1
                yield 1000 * self.passes + order[at]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "begun": self.begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.begun, self.armed = state["at"], state["begun"], True


FACTORIES: dict[str, Callable[[], Any]] = {
    "with methods of generators and of a list": lambda: DataLoader(Bound(), batch_size=3, shuffle=True),
    "with methods of generators and of a list, by workers": lambda: DataLoader(
        Bound(), batch_size=3, shuffle=True, num_workers=2
    ),
    "a prefetcher that was tried": Prefetching,
    "with an open file": lambda: DataLoader(Lines(), batch_size=3, shuffle=True),
    "with an open text": lambda: DataLoader(Lines("r"), batch_size=3, shuffle=True),
    "all of an open text": lambda: DataLoader(LinesOfAll(), batch_size=1),
    "that collates with a generator of its own, by workers": lambda: DataLoader(
        range(16), batch_size=2, num_workers=2, collate_fn=Mixing()
    ),
    "with a sampler that draws on the way": lambda: DataLoader(range(16), batch_size=2, sampler=OnTheWay()),
    "with a sampler that draws on the way, by workers": lambda: DataLoader(
        range(16), batch_size=2, sampler=OnTheWay(), num_workers=2
    ),
    "that is told its epoch": lambda: Epochs(batch_size=3),
    "that is told its epoch, by workers": lambda: Epochs(batch_size=3, num_workers=2),
    "a function that shuffles a list": lambda: of_a_list([*range(7)]),
    "a function that shuffles a list of tensors": lambda: of_a_list([torch.tensor([at, 0.0]) for at in range(7)]),
    "a function that shuffles large tensors": lambda: of_a_list([torch.full((9000,), float(at)) for at in range(7)]),
    "a function that shuffles a global list": of_a_global_list,
    "a function that counts": of_a_nonlocal_count,
    "a function that counts globally": of_a_global_count,
    "a function with a generator by default": of_a_default,
    "a generator that each epoch replaces": lambda: loader(Reseeded()),
    "a generator that each epoch replaces, by workers": lambda: loader(Reseeded(), num_workers=2),
    "a generator made when it is needed": lambda: loader(Lazy()),
    "a generator made when it is needed, by workers": lambda: loader(Lazy(), num_workers=2),
    "a transform that is a module": lambda: loader(Numbers(torch.nn.Sequential(Jitter()))),
    "a transform that is a module, by workers": lambda: loader(Numbers(Jitter()), num_workers=2),
    "many objects before one that draws": lambda: loader(Many()),
    "an order of what nobody takes apart": lambda: loader(sampler=Records()),
    "recent samples": lambda: loader(Mixed()),
    "a count in slots": lambda: loader(sampler=Slots()),
    "a count of numpy": lambda: loader(sampler=Counting(SimpleNamespace(times=np.int64(0)))),
    "a count in a dataclass": lambda: loader(sampler=Counting(Count())),
    "a count in a dataclass with slots": lambda: loader(sampler=Counting(SlottedCount())),
    "a count of the class": lambda: loader(sampler=OfItsClass()),
    "an iterator that counts": lambda: loader(sampler=Called(itertools.count(), next)),
    "seeds": lambda: loader(sampler=Called(np.random.SeedSequence(3), lambda seeds: str(seeds.spawn(1)[0].spawn_key))),
    "a switch": lambda: loader(sampler=Turning(False, True)),
    "a text": lambda: loader(sampler=Turning("easy", "mid", "hard")),
    "a member of an Enum": lambda: loader(sampler=Turning(Phase.EASY, Phase.HARD)),
    "a tuple": lambda: loader(sampler=Ordered(tuple(range(SAMPLES)), lambda now: now[3:] + now[:3])),
    "a tensor": lambda: loader(sampler=Ordered(torch.arange(SAMPLES), lambda now: now[torch.randperm(SAMPLES)])),
    "a tensor changed in place": lambda: loader(sampler=Weights()),
    "a list that comes later": lambda: loader(sampler=Ordered(None, shuffled)),
    "a loader that permutes": Permuted,
    "a loader whose state holds for its next pass": Armed,
    "that refers to what is global": lambda: loader(Referring(), shuffle=True),
    "that refers to what is global, by workers": lambda: loader(Referring(), num_workers=2),
    "that refers to what is global, by workers that are kept": lambda: loader(
        Referring(), num_workers=2, persistent_workers=True
    ),
    "that shares its values": lambda: loader(Shared(), shuffle=True),
    "that shares its values, by workers": lambda: loader(Shared(), shuffle=True, num_workers=2),
    "that shares its values, by workers that are kept": lambda: loader(
        Shared(), shuffle=True, num_workers=2, persistent_workers=True
    ),
    "that is told more": lambda: loader(Stronger(), shuffle=True),
    "that is told more, by workers": lambda: loader(Stronger(), num_workers=2),
    "that is told more, by workers that are kept": lambda: loader(
        Stronger(), shuffle=True, num_workers=2, persistent_workers=True
    ),
    "around one that is told more, by workers that are kept": lambda: Around(
        loader(Stronger(), shuffle=True, num_workers=2, persistent_workers=True)
    ),
    "that collates otherwise, by workers that are kept": lambda: loader(
        collate_fn=Scaling(), num_workers=2, persistent_workers=True
    ),
    "torchdata's, that is told more, by workers that are kept": lambda: StatefulDataLoader(
        Stronger(), batch_size=2, shuffle=True, num_workers=2, persistent_workers=True
    ),
}
VARIANTS = {
    "a function that shuffles a list of tensors",
    "a generator that each epoch replaces, by workers",
    "a transform that is a module, by workers",
    "a count in a dataclass with slots",
    "a count of numpy",
    "a text",
    "a tuple",
}
