"""A source's state into a snapshot's table and out of it again, as a rank does it; and things of every kind."""

from __future__ import annotations

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import io
import ipaddress
import json
import pathlib
import random
import re
import types
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from mt_resilient.checkpoint.arena.staging import Stager
from mt_resilient.checkpoint.format.pytree import unflatten
from mt_resilient.checkpoint.format.tensor_table import Table
from mt_resilient.training.state.sources import Source, sources_of


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


class Level(enum.IntEnum):
    LOW = 1


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Best:
    loss: float
    history: list[Any]

    @classmethod
    def of(cls, loss: float) -> Best:
        return cls(loss, [])


@dataclasses.dataclass(frozen=True)
class Key:
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class SlottedKey:
    name: str


class Meter:
    def __init__(self) -> None:
        self.total = 0.0
        self.seen = [1]

    def add(self, amount: list[int]) -> None:
        self.seen += amount


T = TypeVar("T")


class Buffer(Generic[T]):
    def __init__(self) -> None:
        self.rows = [1]


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 3


class Stated:
    def __init__(self) -> None:
        self.count, self.cache = 3, (i for i in "a generator")

    def __getstate__(self) -> dict[str, int]:
        return {"count": self.count}

    def __setstate__(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Table2(dict):  # type: ignore[type-arg]
    pass


class Names(collections.OrderedDict):  # type: ignore[type-arg]
    pass


class Recent(collections.deque):  # type: ignore[type-arg]
    pass


class Row(list):  # type: ignore[type-arg]
    pass


class Dollars(int):
    pass


def schedule(step: int) -> float:
    return 1.0 / (1 + step)


def spawned() -> np.random.Generator:
    generator = np.random.default_rng(3)
    generator.spawn(2)
    return generator


def subclassed() -> Table2:
    table = Table2(a=[1])
    table.owner = "somebody"  # type: ignore[attr-defined]
    return table


def read_only() -> Any:
    found = np.arange(3)
    found.flags.writeable = False
    return found


THINGS: dict[str, Callable[[], Any]] = {
    "complex": lambda: complex(-0.0, float("nan")),
    "bytearray": lambda: bytearray(b"ab"),
    "tuple": lambda: (1, [2], (3, {"a": 4})),
    "named tuple": lambda: Point(1, [2]),
    "OrderedDict": lambda: collections.OrderedDict(b=1, a=[2]),
    "Counter": lambda: collections.Counter("aab"),
    "typed Counter, OrderedDict": lambda: [collections.Counter[int]([1]), collections.OrderedDict[str, int](a=1)],
    "defaultdict": lambda: collections.defaultdict(list, {1: [2]}),
    "set": lambda: {"a", 1, (2, None), frozenset([3])},
    "frozenset": lambda: frozenset([Colour.RED, 1.5]),
    "deque": lambda: collections.deque([1, [2]], maxlen=3),
    "Enum": lambda: [Colour.RED, Rights.READ | Rights.WRITE, Level.LOW],
    "datetime": lambda: datetime.datetime(2020, 1, 2, 3, 4, 5, 6, datetime.UTC, fold=1),
    "date, time": lambda: [datetime.date(2020, 1, 1), datetime.time(1, 2), datetime.timedelta(1, 2, 3)],
    "timezone": lambda: datetime.timezone(datetime.timedelta(hours=1), "home"),
    "Decimal": lambda: [decimal.Decimal("1.10"), decimal.Decimal("sNaN")],
    "Fraction": lambda: fractions.Fraction(1, 3),
    "UUID": lambda: uuid.UUID(int=5),
    "path": lambda: [pathlib.Path("/a/b"), pathlib.PurePosixPath("c")],
    "range, slice": lambda: [range(3, 9, 2), slice(None, 2), ..., NotImplemented],
    "array.array": lambda: array.array("d", [1.5]),
    "random.Random": lambda: random.Random(4),
    "SimpleNamespace": lambda: types.SimpleNamespace(a=[1], b=2),
    "dataclass": lambda: Best(1.5, [1, [2]]),
    "frozen dataclass": lambda: [Key("a"), SlottedKey("b")],
    "odd keys": lambda: {
        (1, 2): 1,
        None: [2],
        1.5: 3,
        True: 4,
        Colour.RED: 5,
        b"x": 6,
        Key("k"): 7,
        SlottedKey("s"): 8,
    },
    "pattern": lambda: re.compile("a+", re.I),
    "function": lambda: [schedule, Meter, len, np.float32],
    "method": lambda: (lambda meter: [meter, meter.add])(Meter()),
    "method of a class": lambda: Best.of,
    "partial": lambda: functools.partial(schedule, 3),
    "partial of a method": lambda: functools.partial(Meter().add, amount=[2]),
    "address": lambda: [
        ipaddress.ip_address("10.0.0.1"),
        ipaddress.ip_network("10.0.0.0/8"),
        ipaddress.ip_interface("::1/64"),
    ],
    "file in memory": lambda: [io.BytesIO(b"ab"), io.StringIO("a\nb")],
    "object": Meter,
    "object of a generic class": Buffer[int],
    "object of slots": Slotted,
    "object of a state": Stated,
    "subclass of dict": subclassed,
    "subclass of OrderedDict": lambda: Names(b=1, a=2),
    "subclass of deque": lambda: Recent([1], 4),
    "subclass of list": lambda: Row([1, [2]]),
    "subclass of int": lambda: Dollars(7),
    "numpy.Generator": spawned,
    "numpy.RandomState": lambda: np.random.RandomState(2),
    "numpy.RandomState of other bits": lambda: np.random.RandomState(np.random.PCG64(3)),
    "numpy.Generator without seeds": lambda: np.random.Generator(np.random.Philox(key=3)),
    "numpy.MT19937": lambda: np.random.Generator(np.random.MT19937(5)),
    "numpy scalar": lambda: [
        np.float64(0.1),
        np.bool_(True),
        np.datetime64("2020"),
        np.str_("é"),
        np.bytes_(b"b"),
        np.longdouble(1),
    ],
    "numpy.dtype": lambda: [np.dtype("f4"), np.dtype([("a", "<i4"), ("b", "<f8", (2,))])],
    "array": lambda: np.arange(6.0).reshape(2, 3),
    "array of no dimension": lambda: np.array(3.5),
    "array of none": lambda: np.zeros((0, 3)),
    "Fortran's order": lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "big-endian": lambda: np.arange(3).astype(">i4"),
    "strided array": lambda: np.arange(9)[::-2],
    "array of dates": lambda: np.array(["2020-01-01"], "M8[D]"),
    "array of text": lambda: np.array(["a", "bcd"]),
    "structured array": lambda: np.zeros(2, [("a", "<i4"), ("b", "<f8", (2,))]),
    "array that may not be written": read_only,
    "Size, dtype, device": lambda: [
        torch.Size([1, 2]),
        torch.bfloat16,
        torch.device("cpu"),
        torch.strided,
        torch.channels_last,
    ],
    "torch.Generator": lambda: torch.Generator().manual_seed(3),
    "tensor": lambda: torch.arange(6.0).reshape(2, 3),
    "tensor of no dimension": lambda: torch.tensor(3),
    "bfloat16": lambda: torch.ones(3).bfloat16(),
    "complex tensor": lambda: torch.ones(3, dtype=torch.complex64),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "channels last": lambda: torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.ones(1).expand(3),
    "trainable": lambda: torch.ones(2, requires_grad=True),
    "Parameter": lambda: torch.nn.Parameter(torch.ones(2), requires_grad=False),
}
"""A live thing of each kind, anew at each call."""


class Snapshot:
    """What `sources` hold now, its bytes copied."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = dict(sources)
        layout, encoded, leaves = Stager().plan({n: s.collect() for n, s in sources.items()}, torch.is_tensor)
        self.table = Table.from_json(encoded)
        self._leaves = {
            piece.name: torch.as_tensor(np.array(leaf) if isinstance(leaf, np.ndarray) else leaf.detach()).clone(
                memory_format=torch.contiguous_format
            )
            for piece, leaf in zip(layout.pieces, leaves, strict=True)
        }

    def prove(self) -> None:
        kept = unflatten(self.table.skeleton, self._leaves)
        for name, source in self._sources.items():
            if hasattr(source, "prove"):
                source.prove(kept[name])

    def restore(self, sources: Mapping[str, Source] | None = None) -> None:
        leaves = {name: leaf.clone() for name, leaf in self._leaves.items()}
        kept = unflatten(json.loads(json.dumps(self.table.skeleton)), leaves)
        for name, source in (sources or self._sources).items():
            source.restore(kept[name])


def of(thing: Any) -> dict[str, Source]:
    return sources_of({"state": thing})


def told(thing: Any) -> tuple[str, dict[str, bytes]]:
    """All that can be said of it, to the bit: two that are told alike are equal in value, type and in what is the same object."""
    snapshot = Snapshot(of(thing))
    bits = {name: leaf.reshape(-1).view(torch.uint8).numpy().tobytes() for name, leaf in snapshot._leaves.items()}
    return json.dumps(snapshot.table.as_object()), bits
