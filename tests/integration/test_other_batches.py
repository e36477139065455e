"""Loaders that no recovery can put back: the rank says so, once, and goes on. And what is told of the end of an epoch."""

from __future__ import annotations

import copy
import gc
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, get_worker_info

from mt_resilient.training.data.batches import OVER, Batches
from mt_resilient.training.data.checksums import Checksums, of_batch, of_indexes
from mt_resilient.training.data.loader_state import Own as LooksFor
from mt_resilient.training.state.rng import Randomness

LARGE = 40_000
"""More than is kept of an array or a list."""
SAMPLER, LOADER, GROWN = "the sampler of this loader now chooses", "now gives other batches", "the dataset now has"


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, length: int = 24) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class ShuffledArray(Sampler[int]):
    def __init__(self) -> None:
        self.order = np.arange(LARGE)

    def __len__(self) -> int:
        return LARGE

    def __iter__(self) -> Iterator[int]:
        np.random.shuffle(self.order)
        return iter(self.order.tolist())


class ShuffledClasses(ShuffledArray):
    def __init__(self) -> None:
        self.classes = {name: [*range(name, LARGE, 4)] for name in range(4)}

    def __iter__(self) -> Iterator[int]:
        for of_class in self.classes.values():
            random.shuffle(of_class)
        return (index for each in zip(*self.classes.values(), strict=True) for index in each)


class HardFirst(Sampler[int]):
    """It looks at the losses, which the loop changes, for each sample."""

    def __init__(self) -> None:
        self.losses = [0.0] * 24

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        left = set(range(24))
        while left:
            index = max(sorted(left), key=self.losses.__getitem__)
            left.remove(index)
            yield index


class RampUp(Sampler[list[int]]):
    size = 2

    def __iter__(self) -> Iterator[list[int]]:
        left = [*range(24)]
        while left:
            batch, left = left[: self.size], left[self.size :]
            yield batch


class Unseeded(IterableDataset[torch.Tensor]):
    """As webdataset's shuffle does by default."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([float(index)]) for index in random.SystemRandom().sample(range(24), 24))


def loop(loader: Any, begin_epoch: Callable[[int], None] | None = None) -> Batches:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    data = Batches(loader, 3, 1, begin_epoch)
    data.keep(Randomness(()), 0)
    return data


def put_back(data: Batches, kept: Any) -> None:
    place, alone = copy.deepcopy(kept)
    data.go_to(place)
    data.restore(alone)
    data.put_back()


def hard(loader: Any, batch: Any) -> None:
    for index in batch[:, 0].long().tolist():
        loader.sampler.losses[(7 * index + 3) % 24] += 1 + 5 * index % 11


def ramp_up(loader: Any, batch: Any) -> None:
    loader.batch_sampler.size += 1


def nothing(loader: Any, batch: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("make", "body", "said"),
    [
        (lambda: DataLoader(Numbers(LARGE), 8000, sampler=ShuffledArray()), nothing, SAMPLER),
        (lambda: DataLoader(Numbers(LARGE), 8000, sampler=ShuffledClasses()), nothing, SAMPLER),
        (lambda: DataLoader(Numbers(), 2, sampler=HardFirst()), hard, SAMPLER),
        (lambda: DataLoader(Numbers(), 2, sampler=HardFirst(), num_workers=2), hard, SAMPLER),
        (lambda: DataLoader(Numbers(), batch_sampler=RampUp()), ramp_up, SAMPLER),
        (lambda: DataLoader(Unseeded(), 2), nothing, LOADER),
        (lambda: lambda: iter(DataLoader(Unseeded(), 2)), nothing, LOADER),
    ],
    ids=["array", "classes", "hard first", "hard first, by workers", "ramp-up", "unseeded", "unseeded, in a function"],
)
def test_an_epoch_that_begins_otherwise_now_is_told_once(
    make: Callable[[], Any], body: Callable[[Any, Any], None], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    loader = make()
    data = loop(loader)
    for step in range(8):
        body(loader, data.take(step))
    kept = data.place(), data.collect()
    for _ in range(2):
        put_back(data, kept)
        data.take(8)
    told = capsys.readouterr().err
    assert told.count(said) == 1
    assert told.count("may be used twice, and others not at all") == 1


def test_a_dataset_that_has_grown_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    before, after = (loop(DataLoader(Numbers(length), 2, shuffle=True)) for length in (24, 26))
    before.take(3)
    put_back(after, (before.place(), before.collect()))
    told = capsys.readouterr().err
    assert told.count(f"{GROWN} 26 samples, and had 24") == 1
    assert SAMPLER not in told


def test_what_is_read_ahead_does_not_count() -> None:
    ahead, exact = Checksums(), Checksums()
    for batch in ([1, 2], [3, 4], [5, 6]):
        ahead.add(of_indexes(batch))
    exact.add(of_indexes([1, 2]))
    assert ahead.after(1) == exact.after(1)
    assert ahead.after(2) not in (None, ahead.after(3))
    assert ahead.after(4) is None


def test_a_checksum_of_a_batch_sees_order_structure_and_large_tensors() -> None:
    images = torch.rand(8, 3, 16, 16)
    batches = [
        images,
        images.flip(0),
        images.flip(0).transpose(1, 3),
        images.numpy().astype(np.float64),
        {"images": images, "labels": [1, 2]},
        {"images": images, "labels": [2, 1]},
        (images, "cat"),
        [images, "dog"],
        [*range(1000)],
        [*range(999, -1, -1)],
        torch.ones(3, dtype=torch.bfloat16),
        np.array([{"a": 1}], dtype=object),
        None,
    ]
    figures = [of_batch(batch) for batch in batches]
    assert len({*figures}) == len(batches)
    assert figures == [of_batch(copy.deepcopy(batch)) for batch in batches]
    assert of_batch({"a", "b"}) == of_batch({"c", "d"}), "sets have no order that is the same in each life"
    assert of_indexes([np.int64(3), 4]) == of_indexes([3, 4])
    assert of_indexes([(3, "x"), (4, "y")]) == of_indexes([(3, "x"), (4, "y")])


class Estimating(Sampler[list[int]]):
    """As samplers by tokens do: how many batches there are depends on the order."""

    def __init__(self, promised: int) -> None:
        self.promised = promised

    def __len__(self) -> int:
        return self.promised

    def __iter__(self) -> Iterator[list[int]]:
        return (order[:3] for order in [torch.randperm(24).tolist()] * 7)


class Shared(IterableDataset[int]):
    """torch rounds its length up once, and each worker's share has a rest of its own."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        assert worker is not None
        return iter(range(worker.id, 10, worker.num_workers))


def ends_of(data: Batches) -> list[tuple[int, int]]:
    """Epochs and batches of these at which the loop is told that an epoch ends."""
    ends = []
    for step in itertools.count():
        if data.take(step) is OVER:
            return ends
        data.drain()
        if data.ends(data.position):
            ends.append((data.epoch, data.offset))
    raise AssertionError


@pytest.mark.parametrize("promised", [4, 5, 6, 7, 9])
def test_workers_tell_the_end_of_an_epoch_whatever_the_length(
    promised: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for accumulate in (1, 2):
        loader = DataLoader(Numbers(), batch_sampler=Estimating(promised), num_workers=1)
        data = Batches(loader, 3, accumulate, None)
        data.keep(Randomness(()), 0)
        assert ends_of(data) == [(epoch, 7) for epoch in range(3)]
        assert ends_of(Batches(loader, 3, accumulate, None)) == [(epoch, 7) for epoch in range(3)], "and without us"
    assert "promised" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "ends"),
    [
        (lambda: DataLoader(Numbers(), batch_sampler=Estimating(5)), [5]),
        (lambda: DataLoader(Numbers(), batch_sampler=Estimating(9)), []),
        (lambda: DataLoader(Shared(), batch_size=4, num_workers=2), [3]),
    ],
    ids=["fewer", "more", "stream"],
)
@pytest.mark.filterwarnings("ignore")
def test_an_epoch_of_another_length_ends_at_most_once_and_is_told(
    make: Callable[[], Any], ends: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ends_of(loop(make())) == [(epoch, end) for epoch in range(3) for end in ends]
    assert capsys.readouterr().err.count("and len(loader) promised") == 1


class Bar:
    """As tqdm's: it goes through what it is given."""

    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        yield from self.iterable


def test_a_sampler_deep_in_what_goes_around_a_loader_learns_of_its_epoch() -> None:
    sampler = DistributedSampler(Numbers(), 2, 0)
    inner = DataLoader(Numbers(), batch_size=4, sampler=sampler)
    for loader in (Bar(inner), lambda: Bar(inner)):
        data = loop(loader)
        steps = len(inner)
        for step in range(steps + 1):
            data.take(step)
        assert sampler.epoch == 1
        sampler.set_epoch(0)


class Skipping(Sampler[list[int]]):
    """As Accelerate's, which a script that resumes by itself puts in place: it leaves the first batches out, and has no `batch_size`."""

    def __init__(self, skip: int) -> None:
        self.skip = skip

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[at, at + 1] for at in range(0, 24, 2)][self.skip :])


def test_a_loader_of_which_no_batch_size_is_known_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    data = loop(DataLoader(Numbers(), batch_size=2))
    for step in range(3):
        data.take(step)
    kept = copy.deepcopy((data.place(), data.collect()))
    put_back(loop(DataLoader(Numbers(), batch_sampler=Skipping(3))), kept)
    assert SAMPLER in capsys.readouterr().err


class Caching(Dataset[np.ndarray]):
    """It keeps what it has read, as scripts do with their pictures."""

    def __init__(self) -> None:
        self.read: list[Any] = [None] * 24

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        if self.read[index] is None:
            self.read[index] = np.full(3, index)
        return self.read[index]


def test_a_dataset_that_keeps_arrays_in_place_of_nothing_is_kept() -> None:
    data = loop(DataLoader(Caching(), batch_size=2))
    for step in range(3):
        data.take(step)
        data.collect()


def records() -> Any:
    return [{"name": f"a{at}", "sizes": [at, 1], "mask": np.zeros(2), "box": torch.zeros(2)} for at in range(60)]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a number in a list": lambda held: held[7]["sizes"].__setitem__(1, 2),
    "the sign of zero": lambda held: held[0]["mask"].__setitem__(0, -0.0),
    "an array, behind a view": lambda held: held[7]["mask"][:1].fill(3),
    "the shape of an array": lambda held: setattr(held[7]["mask"], "shape", (1, 2)),
    "a tensor, behind numpy's back": lambda held: held[7]["box"].numpy().fill(3),
    "the order of keys": lambda held: held[7].__setitem__("name", held[7].pop("name")),
    "a part that goes to another list": lambda held: held[8]["sizes"].insert(0, held[7]["sizes"].pop()),
    "a new record": lambda held: held.append({"name": "new"}),
    "an equal list": lambda held: held[7].update(sizes=[7, 2]),
}


def told_of(value: Any) -> str:
    """With types, order, and the signs of zeros."""
    return repr(
        [{name: getattr(each, "tolist", lambda each=each: each)() for name, each in row.items()} for row in value]
    )


@pytest.mark.parametrize("changed", [False, True], ids=["once", "after another change"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_each_change_in_a_value_is_kept_though_it_was_compared_before(
    change: Callable[[Any], Any], changed: bool
) -> None:
    value = SimpleNamespace(held=records())
    own = LooksFor(value=value)
    for at in range(3 * changed):
        value.held[9]["sizes"][0] = at
        own.collect()
    assert bool(own.collect()) == bool(own.collect()) == changed
    change(value.held)
    kept = copy.deepcopy(own.collect())
    fresh = SimpleNamespace(held=records())
    other = LooksFor(value=fresh)
    other.restore(kept)
    assert told_of(fresh.held) == told_of(value.held)


def test_a_value_that_has_not_changed_is_not_packed_again_for_each_batch() -> None:
    own = LooksFor(value=SimpleNamespace(held=[{"name": str(at), "of": "b"} for at in range(1000)]))
    own.collect()
    calls = []
    gc.disable()  # what other tests have left may run code when it goes
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code) if event == "call" else None)
    try:
        own.collect()
    finally:
        sys.setprofile(None)
        gc.enable()
    assert len(calls) < 200


def with_a_tree(tree: Any) -> Any:
    dataset: Any = Numbers()
    dataset.tree = tree
    return DataLoader(dataset, batch_size=2, num_workers=1)


def cyclic() -> Any:
    tree: dict[str, Any] = {"name": "root"}
    tree["children"] = [{"parent": tree, "number": at} for at in range(3)]
    return with_a_tree(tree)


def nested() -> Any:
    tree: list[Any] = []
    for _ in range(5000):
        tree = [tree]
    return with_a_tree(tree)


class Buckets(Sampler[list[int]]):
    """Its batches of longer samples are smaller."""

    def __init__(self) -> None:
        self.batch_size, self.num_replicas = {512: 8, 1024: 4}, None

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[at, at + 1] for at in range(0, 24, 2)])

    def __len__(self) -> int:
        return 12


class Telling:
    """A loader with a state of another type than a mapping."""

    def __init__(self, state: Callable[[int], Any]) -> None:
        self.at, self.state = 0, state

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < 12:
            self.at += 1
            yield torch.tensor([float(self.at)])
        self.at = 0

    def state_dict(self) -> Any:
        return self.state(self.at)

    def load_state_dict(self, state: Any) -> None:
        self.at = state if type(state) is int else state[0]


@pytest.mark.parametrize(
    "make",
    [
        cyclic,
        nested,
        lambda: DataLoader(Numbers(), batch_sampler=Buckets()),
        lambda: Telling(lambda at: at),
        lambda: Telling(lambda at: (at, 1)),
        lambda: Telling(lambda _: None),
    ],
    ids=["a value that contains itself", "a deep list", "batch sizes by length", "a number", "a tuple", "nothing"],
)
def test_a_loader_with_odd_values_gives_its_batches_and_goes_back(make: Callable[[], Any]) -> None:
    expected = [batch.tolist() for batch in make()]
    before, after = loop(make()), loop(make())
    kept, found = [], []
    for step in range(len(expected)):
        kept.append((before.place(), copy.deepcopy(before.collect())))
        found.append(before.take(step).tolist())
    assert found == expected
    after.go_to(kept[5][0])
    after.restore(kept[5][1])
    after.put_back()
    assert [after.take(step).tolist() for step in range(5, 10)] == expected[5:10]
