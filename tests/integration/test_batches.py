"""Batches of all sorts of loaders, put back: in the process that has gone on meanwhile, and in one that has just built its loader.

Between two batches the training draws, too (dropout). What is compared is each batch and each of these draws, with an ordinary loop's.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import multiprocessing
import random
import runpy
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torchdata.nodes import Batcher, Prefetcher, SamplerWrapper
from torchdata.nodes import Loader as NodesLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from mt_resilient.resilience.errors import LayoutError, UsageError
from mt_resilient.training.data.batches import OVER, Batches
from mt_resilient.training.data.loader_rng import MOST
from mt_resilient.training.data.loader_state import Own as LooksFor
from mt_resilient.training.state.rng import Randomness
from mt_resilient.training.state.sources import sources_of
from mt_resilient.training.variables.saved_objects import is_within

from ..etcd_cluster import eventually

SAMPLES, EPOCHS = 14, 3


class Numbers(Dataset[torch.Tensor]):
    """draws: from which generators what is loaded depends; own: one of its own."""

    def __init__(self, draws: bool = False, own: Any = None) -> None:
        self.draws, self.own = draws, own

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = random.random() + float(np.random.random()) + float(torch.rand(())) if self.draws else 0.0
        own = self.own.random() if self.own else 0.0
        return torch.tensor([index, noise, own], dtype=torch.float64)


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, length: int = SAMPLES) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for index in range(first, self.length, step):
            yield torch.tensor([index, random.random()], dtype=torch.float64)


class ShuffledStream(Stream):
    """Its order is drawn on the way, from the generator that the training draws from, too."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        left = [*super().__iter__()]
        while left:
            yield left.pop(random.randrange(len(left)))


class Distributed(DataLoader[torch.Tensor]):
    """As people write it: a loader over the shard of a rank."""

    def __init__(self, **how: Any) -> None:
        dataset = Numbers(draws=True)
        super().__init__(dataset, sampler=shard(dataset), **how)


def shard(dataset: Numbers) -> DistributedSampler[torch.Tensor]:
    return DistributedSampler(dataset, num_replicas=2, rank=1)


class Own:
    """A loader of one's own, with a state."""

    def __init__(self) -> None:
        self.at, self.epoch = 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        while self.at < 5:
            self.at += 1
            yield 100 * self.epoch + self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Counting(Sampler[int]):
    """Shuffles by the number of times that it was gone through, as many do that have no `set_epoch`."""

    def __init__(self) -> None:
        self.times = 0

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        return iter(random.Random(self.times).sample(range(SAMPLES), SAMPLES))

    def __len__(self) -> int:
        return SAMPLES


class CountingStream(IterableDataset[torch.Tensor]):
    def __init__(self) -> None:
        self.times = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.times += 1
        yield from (torch.tensor([float(at), self.times]) for at in range(SAMPLES))


class Progressive(Numbers):
    """Its samples depend on how many it has given."""

    def __init__(self) -> None:
        super().__init__()
        self.given = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.given += 1
        return torch.tensor([float(index), self.given])


def cycled(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def beside_a_shorter_one() -> Callable[[], Any]:
    """As people train with few labels: the shorter loader begins anew in the midst of an epoch, with another order."""
    labelled = DataLoader(Subset(Numbers(draws=True), range(4)), batch_size=2, shuffle=True)
    others = DataLoader(Numbers(), batch_size=2, shuffle=True)
    return lambda: (torch.vstack(pair) for pair in zip(cycled(labelled), others, strict=False))


class Shuffling(Sampler[list[int]]):
    """Its batches, by length say, are shuffled in place before each epoch; those of an array, too, and those that it makes anew."""

    def __init__(self) -> None:
        self.batches = [[at, at + 1] for at in range(0, SAMPLES, 2)]
        self.order, self.made = np.arange(len(self.batches)), [*range(len(self.batches))]

    def __iter__(self) -> Iterator[list[int]]:
        random.shuffle(self.batches)
        np.random.shuffle(self.order)
        self.made = random.sample(self.made, len(self.made))
        for at, then in zip(self.order, self.made, strict=True):
            yield [*self.batches[at], *self.batches[then]]


class Mosaic(Numbers):
    """Samples are mixed with some of those that were loaded last."""

    def __init__(self) -> None:
        super().__init__()
        self.last: list[int] = []
        self.met: dict[int, list[int]] = {}

    def __getitem__(self, index: int) -> torch.Tensor:
        self.last = [*self.last[-3:], index]
        self.met.setdefault(index, []).append(len(self.met))
        return torch.tensor([float(index), random.choice(self.last), len(self.met[index])])


EPOCH_BATCHES = """
import random, torch
class EpochBatches:
    def __init__(self):
        self.epoch, self.difficulty = 0, 0.5
    def next_epoch(self):
        self.epoch += 1
        self.difficulty *= 1.5
        order = random.Random(self.epoch).sample(range(14), 14)
        return (torch.tensor([index, self.difficulty]) for index in order)
"""


def epoch_batches() -> Callable[[], Any]:
    """As fairseq's: it makes the iterator of the next epoch, whose number it counts by itself, and is neither a dataset nor a sampler."""
    script: dict[str, Any] = {"__name__": "script"}
    exec(compile(EPOCH_BATCHES, "/script.py", "exec"), script)
    batches = script["EpochBatches"]()
    return lambda: batches.next_epoch()


class OneIterator(DataLoader[torch.Tensor]):
    """As timm's MultiEpochsDataLoader."""

    def __init__(self, **how: Any) -> None:
        super().__init__(Numbers(), **how)
        self.iterator = super().__iter__()

    def __iter__(self) -> Any:
        return self.iterator


class Repeated:
    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return cycled(self.batches)


class InfiniteLoader(DataLoader[torch.Tensor]):
    """As ultralytics', under the name that torch has for its own."""

    def __init__(self, **how: Any) -> None:
        super().__init__(Numbers(), **how)
        self.length = len(self.batch_sampler)  # type: ignore[arg-type]
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
        self._iterator = super().__iter__()  # type: ignore[assignment]

    def __iter__(self) -> Any:
        for _ in range(self.length):
            yield next(self._iterator)  # type: ignore[arg-type]


class Around:
    """As PyG's DataLoaderIterator."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self.iterator._reset(loader, first_iter)

    def __next__(self) -> torch.Tensor:
        return next(self.iterator).flip(0)  # type: ignore[no-any-return]


class Sampled(DataLoader[torch.Tensor]):
    """As PyG's NodeLoader: its iterator changes each batch."""

    def _get_iterator(self) -> Any:
        return Around(super()._get_iterator())


def together() -> Callable[[], Any]:
    first, second = DataLoader(Numbers(), batch_size=3, shuffle=True, generator=seeded()), DataLoader(Progressive(), 3)
    return lambda: map(torch.hstack, zip(first, second, strict=True))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def noise() -> Iterator[torch.Tensor]:
    for _ in range(6):
        yield torch.rand(2)


def behind_a_bar() -> Any:
    """tqdm.auto's keeps an iterator for `async for`, and begins anew in its own `__iter__`."""
    from tqdm.auto import tqdm

    return tqdm(DataLoader(Numbers(), batch_size=3, shuffle=True), disable=True)


def nodes(sampler: Any, ahead: int = 0) -> Any:
    batches: Any = Batcher(SamplerWrapper(sampler), 2, drop_last=False)
    return NodesLoader(Prefetcher(batches, ahead) if ahead else batches)


SEVERAL = {"num_workers": 2, "batch_size": 2}
LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled by the rank's generator": lambda: DataLoader(Numbers(), batch_size=3, shuffle=True),
    "behind a progress bar": behind_a_bar,
    "shuffled by a generator of its own": lambda: DataLoader(Numbers(), batch_size=3, shuffle=True, generator=seeded()),
    "that draws": lambda: DataLoader(Numbers(draws=True), batch_size=3, shuffle=True),
    "that has a generator": lambda: DataLoader(Numbers(own=np.random.default_rng(3)), batch_size=4, shuffle=True),
    "that has one of Python's, deep inside": lambda: DataLoader(
        Subset(ConcatDataset([Numbers(own=random.Random(3))]), range(9)), batch_size=4
    ),
    "without the last batch": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, drop_last=True),
    "in no batches": lambda: DataLoader(Numbers(draws=True), batch_size=None, shuffle=True),
    "with replacement": lambda: DataLoader(
        Numbers(), batch_size=3, sampler=RandomSampler(Numbers(), replacement=True, num_samples=40, generator=seeded())
    ),
    "weighted": lambda: DataLoader(Numbers(), batch_size=3, sampler=WeightedRandomSampler([1.0, 2.0, 3.0] * 4, 12)),
    "of a subset": lambda: DataLoader(Numbers(), batch_size=3, sampler=SubsetRandomSampler(range(2, 12))),
    "with a batch sampler": lambda: DataLoader(
        Numbers(draws=True), batch_sampler=BatchSampler(RandomSampler(Numbers()), 4, drop_last=False)
    ),
    "distributed": lambda: Distributed(batch_size=2),
    "distributed, with a batch sampler": lambda: DataLoader(
        Numbers(), batch_sampler=BatchSampler(shard(Numbers()), 2, drop_last=False)
    ),
    "distributed, in no batches": lambda: DataLoader(Numbers(), batch_size=None, sampler=shard(Numbers())),
    "a stream": lambda: DataLoader(Stream(), batch_size=3),
    "a stream, shuffled on the way": lambda: DataLoader(ShuffledStream(), batch_size=3),
    "a list": lambda: [1, 2, 3, 4, 5],
    "a function that makes an iterator": lambda: noise,
    "with a state": Own,
    "by workers": lambda: DataLoader(Numbers(), shuffle=True, **SEVERAL),
    "by workers that draw": lambda: DataLoader(Numbers(draws=True), shuffle=True, **SEVERAL),
    "with an iterator of its own": lambda: Sampled(Numbers(draws=True), batch_size=3, shuffle=True),
    "with an iterator of its own, by workers": lambda: Sampled(Numbers(draws=True), shuffle=True, **SEVERAL),
    "with an iterator of its own, by workers that are kept": lambda: Sampled(
        Numbers(), shuffle=True, persistent_workers=True, **SEVERAL
    ),
    "by workers that draw, kept": lambda: DataLoader(
        Numbers(draws=True), shuffle=True, persistent_workers=True, **SEVERAL
    ),
    "by workers that have a generator": lambda: DataLoader(
        Numbers(own=random.Random(3)), shuffle=True, generator=seeded(), **SEVERAL
    ),
    "distributed, by workers that are kept": lambda: Distributed(persistent_workers=True, pin_memory=True, **SEVERAL),
    "a stream, by workers": lambda: DataLoader(Stream(), **SEVERAL),
    "a stream, by workers that are kept": lambda: DataLoader(Stream(), persistent_workers=True, **SEVERAL),
    "with a sampler that counts": lambda: DataLoader(Numbers(), batch_size=3, sampler=Counting()),
    "a stream that counts, by workers that are kept": lambda: DataLoader(
        CountingStream(), batch_size=3, num_workers=1, persistent_workers=True
    ),
    "that counts": lambda: DataLoader(Progressive(), batch_size=3, shuffle=True),
    "that counts, by workers": lambda: DataLoader(Progressive(), shuffle=True, **SEVERAL),
    "a function of two": together,
    "with a sampler that shuffles in place": lambda: DataLoader(Numbers(), batch_sampler=Shuffling()),
    "with a sampler that shuffles in place, by workers": lambda: DataLoader(
        Numbers(), batch_sampler=Shuffling(), num_workers=2, persistent_workers=True
    ),
    "that mixes what it has met": lambda: DataLoader(Mosaic(), batch_size=3, shuffle=True),
    "that mixes what it has met, by workers": lambda: DataLoader(Mosaic(), shuffle=True, **SEVERAL),
    "that mixes what it has met, by workers that are kept": lambda: DataLoader(
        Mosaic(), shuffle=True, persistent_workers=True, **SEVERAL
    ),
    "a function of what counts": epoch_batches,
    "beside a shorter one": beside_a_shorter_one,
    "with a generator in what collates": lambda: DataLoader(
        Numbers(),
        batch_size=3,
        collate_fn=partial(lambda noise, each: torch.stack(each) + noise.random(), random.Random(3)),
    ),
    "torchdata's": lambda: StatefulDataLoader(Numbers(draws=True), batch_size=3, shuffle=True),
    "torchdata's, distributed": lambda: StatefulDataLoader(
        Numbers(), batch_size=2, sampler=DistributedSampler(Numbers(), num_replicas=2, rank=1)
    ),
    "torchdata's, by workers": lambda: StatefulDataLoader(Numbers(draws=True), shuffle=True, **SEVERAL),
    "torchdata's, by workers that are kept": lambda: StatefulDataLoader(
        Numbers(draws=True), shuffle=True, persistent_workers=True, **SEVERAL
    ),
    "torchdata's, a stream": lambda: StatefulDataLoader(Stream(), batch_size=3),
    "torchdata's, a stream by workers": lambda: StatefulDataLoader(Stream(), **SEVERAL),
    "torchdata's nodes": lambda: nodes(RandomSampler(range(SAMPLES), generator=seeded())),
    "torchdata's nodes, distributed, that read ahead": lambda: nodes(shard(Numbers()), ahead=2),
}


@cache
def of_a_script() -> Any:
    """The module of loaders beside this one, from where it counts as a script."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(shutil.copy(Path(__file__).with_name("loaders_of_a_script.py"), folder))
        found = importlib.util.spec_from_file_location("loaders_of_a_script", path)
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules[found.name] = module
        found.loader.exec_module(module)
    return module


LOADERS |= of_a_script().FACTORIES


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def drawn() -> tuple[float, ...]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def changes(loader: Any) -> list[Callable[[], None]]:
    """What a loop changes of its loader at the end of an epoch."""
    parts = (loader, *(getattr(loader, name, None) for name in ("dataset", "sampler", "collate_fn")))
    return [part.epoch_ends for part in parts if hasattr(part, "epoch_ends")]


def seed(number: int = 1) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def ordinary(sort: str) -> list[Any]:
    """What a loop without us sees."""
    seed()
    loader = LOADERS[sort]()
    seen = []
    for epoch in range(EPOCHS):
        batches = getattr(loader, "batch_sampler", None)
        inner = (getattr(loader, name, None) for name in ("sampler", "dataset"))
        for part in (loader, getattr(batches, "sampler", None), *inner):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        for batch in loader() if callable(loader) else loader:
            seen.append((plain(batch), drawn()))
        for change in changes(loader):
            change()
    return seen


def watched(
    loader: Any, epochs: int | None = None, accumulate: int = 1, begin_epoch: Any = None, rank: int = 0
) -> Batches:
    """As a Session has them."""
    data = Batches(loader, epochs, accumulate, begin_epoch)
    data.keep(Randomness(()), rank)
    return data


def state_of(data: Batches) -> Any:
    return data.place(), data.collect()


def put_back(data: Batches, kept: Any) -> None:
    place, alone = kept
    data.go_to(place)
    data.restore(alone)
    assert state_of(data) == kept, "a snapshot that is taken before it is put back is the same"
    data.put_back()


class Loop:
    """What a Session does with batches, and what it keeps after each step."""

    def __init__(self, sort: str, number: int = 1) -> None:
        seed(number)
        self.randomness = Randomness(())
        loader = LOADERS[sort]()
        self.data = Batches(loader, EPOCHS, 1, None)
        self.data.keep(self.randomness, 0)
        self.changes = changes(loader)
        self.kept: list[Any] = []

    def run(self, step: int, most: int = 10**9) -> list[Any]:
        seen: list[Any] = []
        while len(seen) < most:
            self.kept.append(copy.deepcopy((state_of(self.data), self.randomness.collect())))
            batch = self.data.take(step + len(seen))
            if batch is OVER:
                break
            seen.append((plain(batch), drawn()))
            if self.changes and self.data.ends(self.data.position):
                for change in self.changes:
                    change()
        return seen

    def go_back(self, kept: Any) -> None:
        data, rank = copy.deepcopy(kept)
        put_back(self.data, data)
        self.randomness.restore(rank)


@pytest.mark.parametrize(
    "sort",
    [pytest.param(sort, marks=[pytest.mark.variant] if sort in of_a_script().VARIANTS else []) for sort in LOADERS],
)
@pytest.mark.filterwarnings("ignore")
def test_a_loader_is_put_back(sort: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = ordinary(sort)
    undisturbed = Loop(sort)
    assert undisturbed.run(0) == expected
    epoch = len(expected) // EPOCHS
    at = [0, 1, epoch, 2 * epoch + 2, len(expected)]
    same = Loop(sort)
    same.run(0, 2 * epoch + 1)
    for step in at:
        same.go_back(undisturbed.kept[step])
        assert same.run(step, 4) == expected[step : step + 4], f"in place, at step {step}"
    for step in (3, 2 * epoch - 1):
        fresh = Loop(sort, number=2)  # what has been drawn meanwhile does not matter
        fresh.go_back(undisturbed.kept[step])
        assert fresh.run(step) == expected[step:], f"in a new process, at step {step}"
    assert "than before the recovery" not in capsys.readouterr().err


@pytest.mark.parametrize("how", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_the_loader_stays_the_script_s(how: dict[str, Any]) -> None:
    """What the script gives it on the way counts from the next epoch on, as in a loop without us; and the script may go through it, too."""

    def half(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) / 2

    def seen(epochs: Iterator[Iterator[Any]], loader: Any) -> list[Any]:
        found = []
        for epoch, batches in enumerate(epochs):
            found += [batch.tolist() for batch in batches]
            found += [batch.tolist() for batch in loader]
            if epoch == 0:
                loader.collate_fn = half
        return found

    def loader() -> Any:
        seed()
        return DataLoader(Numbers(), batch_size=4, shuffle=True, **how)

    def ours(loader: Any) -> Iterator[Iterator[Any]]:
        data = watched(loader, EPOCHS)
        for epoch in range(EPOCHS):
            yield (data.take(4 * epoch + at) for at in range(4))

    plain, mine = loader(), loader()
    expected = seen(((batch for batch in plain) for _ in range(EPOCHS)), plain)
    mine = loader()
    found = seen(ours(mine), mine)
    assert found == expected


def test_what_was_used_already_is_not_loaded_again() -> None:
    class Counted(Numbers):
        loaded: ClassVar[list[int]] = []

        def __getitem__(self, index: int) -> torch.Tensor:
            self.loaded.append(index)
            return super().__getitem__(index)

    before, after = (watched(DataLoader(Counted(), batch_size=2, shuffle=True)) for _ in range(2))
    before.take(4)
    kept = state_of(before)
    expected = before.take(5).tolist()
    Counted.loaded.clear()
    put_back(after, kept)
    assert Counted.loaded == []
    assert after.take(5).tolist() == expected


def test_what_can_only_be_replayed_says_once_what_that_has_cost(capsys: pytest.CaptureFixture[str]) -> None:
    data = watched([1, 2, 3, 4])
    for at in (2, 3):
        data.take(at)
        put_back(data, state_of(data))
    told = "can only be replayed from the start of its epoch. Batches loaded again and thrown away: 3"
    assert capsys.readouterr().err.count(told) == 1


def test_a_loader_that_draws_for_each_batch_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    def batches() -> Iterator[float]:
        while True:
            yield random.random()

    data = watched(batches)
    for step in range(3 * MOST):
        if step == 3:
            go_to = copy.deepcopy(state_of(data))
        random.random()
        data.take(step)
    assert capsys.readouterr().err.count("from the random generators that the training also uses") == 1
    assert len(data.collect()["draws"]) == MOST
    put_back(data, go_to)
    assert len(data.collect()["draws"]) == 2


def test_what_has_changed_and_cannot_be_kept_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A rank other than the first says nothing."""
    for rank, times in ((0, 1), (1, 0)):
        data = watched(of_a_script().Endless(), rank=rank)
        for step in range(4):
            data.take(step)
            data.collect()
        said = capsys.readouterr().err
        assert said.count("loader.numbers has changed, and no recovery restores it") == times
        assert said.count("loader.") == times, "a file that is opened late, a large tensor that stays"


def test_an_iterator_that_was_there_and_has_moved_on_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    loader = of_a_script().Iterating()
    data = watched(loader)
    for step in range(4):
        data.take(step)
        data.collect()
    said = capsys.readouterr().err
    assert said.count("loader.made, loader.cycle, loader.letters has changed, and no recovery restores it") == 1
    assert said.count("loader.") == 3, "and none that has not moved on"


def test_a_variable_that_becomes_an_object_is_left_where_a_restart_finds_it(tmp_path: Path) -> None:
    """A file that is opened when it is needed: the restart took the variable away."""
    (tmp_path / "script.py").write_text(
        "import os\n"
        "file = None\n"
        "def batches():\n"
        "    global file\n"
        "    file = file or open(os.devnull)\n"
        "    return iter(range(9))\n"
    )
    before, after = (runpy.run_path(str(tmp_path / "script.py")) for _ in range(2))
    owns = [LooksFor(thing=script["batches"]) for script in (before, after)]
    before["batches"]()
    kept = owns[0].collect()
    owns[1].restore(kept)
    assert list(after["batches"]()) == [*range(9)]
    for script in (before, after):
        script["batches"].__globals__["file"].close()


def test_workers_of_another_loader_that_the_loop_goes_through_are_there_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Starting them anew draws from the rank's generators: the training had other numbers after a recovery."""

    def life(number: int) -> tuple[Batches, Randomness, Callable[[int], Any]]:
        seed(number)
        kept = {"persistent_workers": True, **SEVERAL}
        around = of_a_script().Around(DataLoader(Numbers(), shuffle=True, **kept))
        around.validation = DataLoader(Numbers(), **kept)
        data, randomness = Batches(around, None, 1, None), Randomness(())
        data.keep(randomness, 0)
        return data, randomness, lambda step: (plain(data.take(step)), len(list(around.validation)), drawn())

    data, randomness, step = life(1)
    for number in range(9):
        step(number)
    kept, rank = copy.deepcopy(state_of(data)), randomness.collect()
    expected = [step(9), step(10)]
    for one, generators, again in ((data, randomness, step), life(2)):
        put_back(one, copy.deepcopy(kept))
        generators.restore(rank)
        assert [again(9), again(10)] == expected
        one.end()
    assert capsys.readouterr().err.count("Its persistent workers were started again") == 2


def test_what_is_large_is_let_go_when_it_has_changed() -> None:
    loader = of_a_script().Endless()
    loader.shard = torch.zeros(10**5)
    shard = weakref.ref(loader.shard)
    own = LooksFor(loader=loader)
    loader.shard = torch.ones(10**5)
    assert (own.collect(), own.lost()) == ({}, ["loader.shard"])
    assert shard() is None
    own.restore({})
    assert loader.shard[0] == 1


def test_what_is_left_out_is_left_out_after_each_recovery() -> None:
    """Batch 3 is bad; the state is that after it would have come."""

    before, after = (watched(DataLoader(Numbers(), batch_size=2), 2) for _ in range(2))
    before.take(2)
    used = before.take(4).tolist()
    assert [row[0] for row in used] == [8, 9]
    put_back(after, state_of(before))
    assert after.take(5).tolist() == before.take(5).tolist()
    assert before.take(14) is OVER


def test_on_another_number_of_ranks_the_samples_go_on_and_generators_begin_anew(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def loop(rank: int, ranks: int, batch_size: int) -> Batches:
        sampler: Any = DistributedSampler(Numbers(), num_replicas=ranks, rank=rank)
        return watched(DataLoader(Numbers(), batch_size=batch_size, sampler=sampler), 2, rank=rank)

    before, after = loop(0, 1, batch_size=2), loop(1, 2, batch_size=1)
    before.take(8)
    after.go_to(before.place())
    assert after.collect()["start"] is None
    after.put_back()
    assert (after.epoch, after.offset) == (1, 2)
    assert after.take(9).tolist() == before.take(9)[1:].tolist()
    fewer = loop(0, 1, batch_size=4)
    fewer.go_to(before.place())
    fewer.put_back()
    assert (fewer.epoch, fewer.offset) == (1, 1), "a half batch is used again"
    assert "random generators" not in capsys.readouterr().err


def test_on_another_number_of_ranks_a_drawn_order_is_another_and_the_first_rank_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for rank, used, said in ((0, 3, 1), (0, 0, 0), (1, 3, 0)):
        before, after = (watched(DataLoader(Numbers(), batch_size=2, shuffle=True), 2, rank=rank) for _ in range(2))
        for index in range(used):
            before.take(index)
        after.go_to(before.place())
        after.put_back()
        assert capsys.readouterr().err.count("of this epoch may be used twice, and others not at all") == said


def test_an_epoch_that_another_number_of_ranks_began_comes_back_in_the_same_order() -> None:
    def loop(seed: int) -> Batches:
        generator = torch.Generator().manual_seed(seed)
        return watched(DataLoader(Numbers(), batch_size=2, shuffle=True, generator=generator), 3)

    before, after, again = loop(1), loop(2), loop(2)
    before.take(7)
    after.go_to(before.place())
    after.put_back()
    kept = state_of(after)
    expected = [after.take(step).tolist() for step in range(8, 15)]
    put_back(again, kept)
    assert [again.take(step).tolist() for step in range(8, 15)] == expected
    put_back(after, kept)
    assert [after.take(step).tolist() for step in range(8, 15)] == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_size_that_changes_from_epoch_to_epoch_is_that_of_the_epoch(workers: int) -> None:
    """In a new process, and in the one that has gone on to the next epoch."""

    def loop(number: int) -> Batches:
        seed(number)
        loader: Any = DataLoader(Numbers(), batch_size=2, shuffle=True, num_workers=workers)

        def begin_epoch(epoch: int) -> None:
            loader.batch_sampler.batch_size = (2, 5, 1)[epoch]

        return watched(loader, EPOCHS, begin_epoch=begin_epoch)

    before, after = loop(1), loop(2)
    kept = []
    expected = []
    for step in range(12):
        kept.append(copy.deepcopy((state_of(before), random.getstate(), torch.get_rng_state())))
        expected.append(plain(before.take(step)))
    for data, step in ((after, 9), (before, 9), (before, 4), (after, 5), (after, 11)):
        place, *drawn = kept[step]
        put_back(data, place)
        random.setstate(drawn[0])
        torch.set_rng_state(drawn[1])
        assert [plain(data.take(at)) for at in range(step, 12)] == expected[step:], step


@pytest.mark.parametrize("stay", [False, True])
def test_its_workers_go_with_the_loop_or_stay_with_the_loader(stay: bool) -> None:
    before = {*multiprocessing.active_children()}

    def workers() -> int:
        return len({*multiprocessing.active_children()} - before)

    loader = DataLoader(Numbers(), persistent_workers=stay, **SEVERAL)
    data = watched(loader)
    data.take(0)
    assert workers() == 2
    data.end()
    eventually(lambda: workers() == 2 * stay)
    drawn = torch.get_rng_state()
    assert len([*loader]) == 7
    assert torch.equal(drawn, torch.get_rng_state()) == stay
    del data, loader
    gc.collect()
    eventually(lambda: workers() == 0)


def test_steps_of_several_batches_are_put_back() -> None:
    """One that uses only some of its batches, too: the others are not those of the next step."""

    def loop(number: int) -> Batches:
        torch.manual_seed(number)
        return watched(DataLoader(Numbers(draws=True), batch_size=2, shuffle=True), accumulate=3)

    def used(data: Batches, step: int) -> list[Any]:
        batches = data.take(step)
        seen = [next(batches).tolist()] if step % 2 else [batch.tolist() for batch in batches]
        data.drain()
        return seen

    before, after, randomness = loop(1), loop(2), Randomness(())
    assert [len(used(before, step)) for step in range(4)] == [3, 1, 1, 1]
    kept, rank = state_of(before), randomness.collect()
    expected = [used(before, step) for step in (4, 5, 6)]
    put_back(after, kept)
    randomness.restore(rank)
    assert [used(after, step) for step in (4, 5, 6)] == expected


def test_a_state_without_a_place_in_the_data_is_refused_where_it_is_the_jobs_own() -> None:
    """Of another job it is taken: the data begins with its first batch then."""
    data = Batches([1, 2, 3], None, 1, None)
    with pytest.raises(LayoutError, match="contains no position in the data"):
        data.restored(2, same_job=True)
    data.restored(2, same_job=False)
    assert data.take(2) == 1


class Prefetching:
    """As timm's PrefetchLoader."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


@pytest.mark.parametrize("kind", [OneIterator, InfiniteLoader])
@pytest.mark.parametrize(
    "around",
    [
        lambda loader: loader,
        Prefetching,
        lambda loader: Prefetching(Prefetching([loader])),
        lambda loader: lambda: Prefetching(loader),
    ],
)
def test_a_loader_that_keeps_one_iterator_is_refused(kind: Any, around: Any) -> None:
    with pytest.raises(UsageError, match=f"was given a {kind.__name__}.*persistent_workers=True"):
        Batches(around(kind(batch_size=3)), EPOCHS, 1, None)


def test_a_loader_beside_those_that_give_the_batches_may_keep_one_iterator() -> None:
    loader, evaluation = Prefetching(DataLoader(Numbers(), batch_size=3)), OneIterator(batch_size=3)
    trainer = SimpleNamespace(loader=loader, evaluation=evaluation)
    for batches in (loader, lambda: iter(trainer.loader)):
        Batches(batches, EPOCHS, 1, lambda epoch: print(trainer, evaluation))


@pytest.mark.parametrize("kind", [DataLoader, Sampled, StatefulDataLoader])
@pytest.mark.parametrize("stays", [True, pytest.param(False, marks=pytest.mark.variant)])
def test_a_part_of_a_pass_of_the_script_s_own_in_the_last_step_of_an_epoch_is_no_part_of_the_epoch(
    kind: Any, stays: bool
) -> None:
    def life() -> tuple[Any, Batches]:
        loader = kind(Numbers(), num_workers=1, batch_size=2, persistent_workers=stays)
        return loader, watched(loader, EPOCHS)

    def run(loader: Any, data: Batches, at: int) -> Iterator[Any]:
        while (batch := data.take(at)) is not OVER:
            at += 1
            if data.ends(at):
                assert len([*zip(range(3), loader, strict=False)]) == 3
            kept.append(copy.deepcopy(state_of(data)))
            yield batch.tolist()

    kept: list[Any] = []
    expected = [batch.tolist() for batch in DataLoader(Numbers(), batch_size=2)]
    expected = [batch[::-1] for batch in expected] if kind is Sampled else expected
    steps = len(expected)
    assert [*run(*life(), 0)] == expected * EPOCHS
    for step in (steps - 1, steps, steps + 1):
        again = life()
        put_back(again[1], kept[step - 1])
        assert [*run(*again, step)] == (expected * EPOCHS)[step:], f"from step {step}"


@pytest.mark.parametrize("kind", [DataLoader, Sampled, StatefulDataLoader])
def test_a_pass_of_the_script_s_own_within_an_epoch_ends_the_epoch_with_a_recovery_and_without(kind: Any) -> None:
    """The workers that are kept have left the loop's pass."""

    def life() -> tuple[Any, Batches]:
        loader = kind(Numbers(), num_workers=1, batch_size=2, persistent_workers=True)
        return loader, watched(loader, EPOCHS)

    def run(loader: Any, data: Batches, at: int) -> Iterator[Any]:
        while (batch := data.take(at)) is not OVER:
            at += 1
            if at == 3:
                next(iter(loader))
                assert data.ends(at)
            kept.append(copy.deepcopy(state_of(data)))
            yield batch.tolist()

    kept: list[Any] = []
    expected = [*run(*life(), 0)]
    steps = SAMPLES // 2
    assert (expected[3:], len(expected)) == (expected[3 : 3 + steps] * (EPOCHS - 1), 3 + steps * (EPOCHS - 1))
    again = life()
    put_back(again[1], kept[2])
    assert [*run(*again, 3)] == expected[3:]


def test_a_state_of_torchdata_s_loader_is_that_of_the_loop_s_pass() -> None:
    loader = StatefulDataLoader(Numbers(), batch_size=2)
    data, again = watched(loader), watched(StatefulDataLoader(Numbers(), batch_size=2))
    for step in range(3):
        data.take(step)
    next(iter(loader))
    put_back(again, copy.deepcopy(state_of(data)))
    assert again.take(3).tolist() == data.take(3).tolist()


def test_a_changed_value_that_the_session_was_given_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    state = {"rows": [object()]}
    other = [object()]
    data = Batches([SimpleNamespace(state=state, other=other)] * 3, 1, 1, None)
    data.keep(Randomness(()), 0, lambda known: is_within(known, [torch.nn.Linear(2, 2), state]))
    for step in range(3):
        data.take(step)
        state["rows"].append(object())
        state["more"] = [object()]
        other.append(object())
        data.collect()
    said = capsys.readouterr().err
    assert said.count("loader.0.other has changed, and no recovery restores it") == 1
    assert "state" not in said


def test_what_a_begin_epoch_draws_from_is_put_back() -> None:
    def loop() -> Batches:
        sampler = shard(Numbers())
        noise, count = random.Random(5), [0]

        def begin_epoch(epoch: int) -> None:
            count[0] += 1
            sampler.set_epoch(noise.randrange(1000) + count[0])

        return watched(DataLoader(Numbers(), batch_size=2, sampler=sampler), EPOCHS, begin_epoch=begin_epoch)

    before, after = loop(), loop()
    before.take(5)
    kept = copy.deepcopy(state_of(before))
    expected = [plain(before.take(step)) for step in range(6, 12)]
    for data in (before, after):
        put_back(data, copy.deepcopy(kept))
        assert [plain(data.take(step)) for step in range(6, 12)] == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_begin_epoch_makes_of_the_model_is_put_back(workers: int) -> None:
    """Pseudo-labels. A recovery calls begin_epoch with the model of the middle of the epoch; the workers get the labels of before."""

    def loop(weight: list[int]) -> Batches:
        labels = torch.zeros(len(Numbers()), dtype=torch.int64)
        dataset = TensorDataset(torch.arange(len(labels)), labels)

        def begin_epoch(epoch: int) -> None:
            labels.copy_(torch.arange(len(labels)) * weight[0] + epoch)

        return watched(DataLoader(dataset, batch_size=2, num_workers=workers), EPOCHS, begin_epoch=begin_epoch)

    weight = [3]
    before, after = loop(weight), loop(weight)
    before.take(1)
    kept = copy.deepcopy(state_of(before))
    expected = [torch.stack(before.take(step)).tolist() for step in range(2, 4)]
    weight[0] = 4
    for data in (before, after):
        put_back(data, copy.deepcopy(kept))
        assert [torch.stack(data.take(step)).tolist() for step in range(2, 4)] == expected


def test_a_long_list_of_pairs_is_data_and_not_looked_through() -> None:
    """An ImageFolder lists a million files: the search through them took 20 s before the first step."""
    files = [(f"{number}.jpg", number) for number in range(100_000)]
    looked: list[Any] = []

    class Looking(LooksFor):
        def _look(self, name: str, thing: Any) -> Iterator[tuple[Any, Any]]:
            looked.append(thing)
            return super()._look(name, thing)

    Looking(loader=[SimpleNamespace(samples=files, labels={name: [number] for name, number in files})])
    assert len(looked) < 10


def test_only_the_ends_of_a_long_list_or_mapping_are_looked_at() -> None:
    """A look at a million samples takes a second in each worker, and copies the memory of all of them there."""
    draw = [random.Random(at) for at in range(6)]
    rows: list[list[Any]] = [
        [first.random, *[None] * 1500, amid.random, *[None] * 1500, last.random]
        for first, amid, last in (draw[:3], draw[3:])
    ]
    own = LooksFor(loader=SimpleNamespace(parts=rows[0], named=dict(enumerate(rows[1]))))
    things = [thing for thing in own.things() if type(thing) is dict]
    assert {draw.index(thing["self"]) for thing in things if "self" in thing} == {0, 2, 3, 5}


def test_what_functions_of_the_script_refer_to_is_found(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import random\n"
        "noise, shuffled = random.Random(3), random.Random(4)\n"
        "class Base:\n"
        "    def __getitem__(self, index):\n"
        "        return index + noise.random()\n"
        "class Samples(Base): pass\n"
        "def batches():\n"
        "    return (each for each in shuffled.sample(range(9), 9))\n"
    )
    script = runpy.run_path(str(tmp_path / "script.py"))
    for thing, generator in ((script["Samples"](), "noise"), (script["batches"], "shuffled")):
        assert LooksFor(thing=thing).values() == [script[generator]]


class Cycling:
    """A loop's own way through a loader, from epoch to epoch."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.batches = loader, iter(loader)

    def take(self, count: int) -> list[Any]:
        taken = []
        while len(taken) < count:
            try:
                taken.append(plain(next(self.batches)))
            except StopIteration:
                taken.append("the end")
                self.batches = iter(self.loader)
        return taken


@pytest.mark.parametrize("before", [2, 4, 5, 7])
@pytest.mark.parametrize(
    "how",
    [
        {"batch_size": 3, "shuffle": True},
        {"shuffle": True, **SEVERAL},
        {"shuffle": True, "persistent_workers": True, **SEVERAL},
    ],
)
def test_an_iterator_of_the_loop_s_own_goes_back_with_its_loader(how: dict[str, Any], before: int) -> None:
    """torchdata's loaders, given to the Session and gone through beside us: a rewind left the live iterator where it was."""
    lives = [Cycling(StatefulDataLoader(Numbers(), **how)) for _ in range(2)]
    sources = [sources_of({"loader": life.loader})["loader"] for life in lives]
    lives[0].take(before)
    kept, drawn = copy.deepcopy(sources[0].collect()), torch.get_rng_state()
    expected = lives[0].take(9)
    for life, source in zip(lives, sources, strict=True):
        source.restore(copy.deepcopy(kept))
        torch.set_rng_state(drawn)
        assert life.take(9) == expected
