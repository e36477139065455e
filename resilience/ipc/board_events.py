"""Faults that a rank found together with its peers, as it writes them on its page (its block of shared memory) for the agent: rewinds in
place, and sightings (findings on which the ranks do not act).

A ring buffer keeps the last few records of each kind. A record is a row of eight-byte integers, followed by two floats.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

from ..model.cause import Kind
from ..model.data_windows import Window
from ..model.rewind import Remedy
from ..model.types import OrderedBy, Rank

RANKS_NAMED = 3
"""The most ranks that a record names as out of line. One integer holds them, with 16 bits for each. If more ranks are out of line, no
single rank is at fault."""
_CAUSES, _REMEDIES = (*Kind, *OrderedBy), tuple(Remedy)


@dataclass(frozen=True, kw_only=True)
class Noted:
    """The record of one fault. Times are CLOCK_MONOTONIC nanoseconds; `signals.WrongSteps` explains the fields."""

    kind: str
    """The reason: a `Kind` of fault, or an `OrderedBy`."""
    onset: int
    to: int
    remedy: Remedy
    window: Window | None
    value: float
    expected: float
    at_ns: int


@dataclass(frozen=True, kw_only=True)
class Rewound(Noted):
    """The record of a finished rewind in place."""

    reached: int
    ranks: tuple[Rank, ...] = ()
    """Ranks whose own gradient was out of line, at most `RANKS_NAMED`."""
    done_ns: int
    order: int = 0
    """Number of the order that the ranks obeyed; 0: there was no order."""


@dataclass(frozen=True, kw_only=True)
class Sighted(Noted):
    """The record of a finding on which the ranks do not act: they only observe, or they wait."""

    kind: Kind
    seen: int
    last: int
    outcome: int = 0
    """A `loss_level.Outcome`."""


def _packed(ranks: tuple[Rank, ...]) -> tuple[int]:
    return (sum(rank + 1 << 16 * at for at, rank in enumerate(ranks)),)


def _unpacked(ranks: int) -> tuple[Rank, ...]:
    return tuple(Rank((ranks >> 16 * at & 0xFFFF) - 1) for at in range(RANKS_NAMED) if ranks >> 16 * at)


def _at(names: Sequence[Any], place: int) -> Any:
    if not 0 <= place < len(names):
        raise ValueError(f"{place} is none of {len(names)}")
    return names[place]


def _window(start: int, stop: int) -> Window | None:
    if not stop:
        return None
    if not 0 <= start < stop:
        raise ValueError(f"{start}:{stop} is no window")
    return Window(start, stop)


_PLAIN = 1, lambda number: (number,), lambda number: number
_CODES: dict[str, tuple[int, Callable[[Any], Sequence[int]], Callable[..., Any]]] = {
    "kind": (1, lambda kind: (_CAUSES.index(kind),), lambda place: _at(_CAUSES, place)),
    "remedy": (1, lambda remedy: (_REMEDIES.index(remedy),), lambda place: _at(_REMEDIES, place)),
    "window": (2, lambda w: (w.start, w.stop) if w else (0, 0), _window),
    "ranks": (1, _packed, _unpacked),
}
"""For each field that is not an integer: how many integers it takes, and the functions that write and read it."""

N = TypeVar("N", bound=Noted)


class Ring(Generic[N]):
    """A ring buffer of the last `kept` records, which begins at byte `at` of a page."""

    def __init__(self, at: int, kept: int, made: type[N], fields: str) -> None:
        """fields: the fields' names as they follow each other on the page; `value` and `expected` come last."""
        self._at, self.kept, self._made = at, kept, made
        self._codes = [(name, *_CODES.get(name, _PLAIN)) for name in (*fields.split(), "value", "expected")]
        self._form = struct.Struct(f"{sum(width for _, width, *_ in self._codes) - 2}q2d")

    def place(self, ordinal: int) -> int:
        return self._at + ordinal % self.kept * self._form.size

    def put(self, page: memoryview, ordinal: int, noted: N) -> None:
        numbers = (number for name, _, write, _ in self._codes for number in write(getattr(noted, name)))
        self._form.pack_into(page, self.place(ordinal), *numbers)

    def get(self, page: memoryview, ordinal: int) -> N:
        """Return the `ordinal`-th record. Raises ValueError if `put` cannot have written these bytes."""
        numbers = iter(self._form.unpack_from(page, self.place(ordinal)))
        return self._made(**{name: read(*islice(numbers, width)) for name, width, _, read in self._codes})


PAGE_BYTES = 4096
REWINDS_AT = 512
REWINDS = Ring(REWINDS_AT, 8, Rewound, "onset reached to at_ns done_ns kind remedy window order ranks")
"""A ring of eight records: the agent reads them once a second, and a step may be replayed several times in that time."""
SIGHTINGS = Ring(PAGE_BYTES - 2 * 12 * 8, 2, Sighted, "onset seen last outcome to at_ns kind remedy window")
"""A ring of two records. Each fault has one record, so two are enough between two reads of the agent."""
