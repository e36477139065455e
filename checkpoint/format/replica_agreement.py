"""Which tensors data-parallel ranks hold alike, and whether they still do. Pure.

tables of ranks → `comparisons`: who must hold the same bits → `Ledger.look`, snapshot by snapshot → `Apart`: what no longer agrees
→ `wrong`: who is in the minority

Who must agree is read off the tables. Ranks that hold the same places of all the model's tensors are data-parallel replicas of each
other: bit by bit the same, because all of them add the same reduced gradients. (Tensor- and expert-parallel ranks have some tensors in
common too. Nobody promises that these stay alike to the last bit, so they are not compared. Nor are tensors of a model that no optimizer
trains, where it tells which: DistributedDataParallel makes the statistics of a BatchNorm alike in each forward pass, and the next batch
makes them differ. So they may be alike in all snapshots behind an evaluation.) Where nobody knows the places (a bare
module given to `Session`), ranks whose tables name the same tensors may be replicas, and are once all of their optimizers' tensors have
moved alike. Compared are these, and the parameters that optimizers name.

And it is learned: a tensor counts once it has taken TRUSTED values one after the other and was alike on all ranks in each of them; one
that differs before that differs on purpose (statistics of a batch, parameters that are gathered later) and is left out for good. So a
finding always means: these were the same bits, and are not any more. What that cannot see: tensors that never change, and what goes
wrong before it is trusted.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .tensor_table import Piece, Table

Words: TypeAlias = NDArray[np.uint64]
Numbers: TypeAlias = NDArray[np.intp]
NONE: Numbers = np.zeros(0, np.intp)

TRUSTED = 4
"""Different values in a row. One is how all start (zeros, ones); each further one shows that they move together."""

_OPTIMIZER = re.compile(r"[^/]+/\d+/(state|main)/")
"""Names of an optimizer's tensors, as `training/state/optimizers/optimizers.py` gives them."""
_FLOATS = ("float", "bfloat", "complex")
"""Integers among a model's tensors are counters, which may be alike for long and differ with the data one day."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Ranks that hold the same tensors."""

    ranks: tuple[int, ...]
    """Places in the list of tables."""
    names: tuple[str, ...]
    """Of the tensors, as people know them."""
    pieces: Numbers
    """Their numbers in the tables, one row a tensor, one column a rank."""
    moments: NDArray[np.bool_]
    """The rows that an optimizer makes of gradients: its tensors, but for single numbers, which count steps."""
    telling: NDArray[np.bool_] | None = None
    """Where places are not known: the rows that all have to move alike before any counts."""


@dataclass(frozen=True, kw_only=True)
class Apart:
    """A tensor that was the same on all of some ranks, and is not any more."""

    name: str
    words: Mapping[int, int]
    """Its fingerprint by rank (place in the list of tables)."""


def wrong(words: Mapping[int, int]) -> frozenset[int] | None:
    """Those that differ from what more than half of all hold; None where no such majority says who is wrong, as always with two."""
    if not words:
        return frozenset()
    (word, votes), *_ = Counter(words.values()).most_common(1)
    if 2 * votes <= len(words):
        return None
    return frozenset(rank for rank, found in words.items() if found != word)


def convicted(words: Mapping[int, int], right: int) -> frozenset[int] | None:
    """Those that had another value than the one that computing it again has given on all ranks; None where nobody had that one."""
    if right not in words.values():
        return None
    return frozenset(rank for rank, found in words.items() if found != right)


def comparisons(tables: Sequence[Table]) -> tuple[Comparison, ...]:
    """What is to be compared among ranks with these tables; empty where no two of them are replicas."""
    classes: dict[tuple[bool, Hashable], list[int]] = defaultdict(list)
    for rank, table in enumerate(tables):
        classes[_class(table)].append(rank)
    found = []
    for (placed, _), ranks in classes.items():
        if len(ranks) < 2:
            continue
        rows: dict[Hashable, dict[int, int]] = defaultdict(dict)
        told = [_trained(tables[rank]) for rank in ranks]
        trained = told[0] if all(each == told[0] for each in told) else set()
        for rank in ranks:
            for number, piece in enumerate(tables[rank].pieces):
                if _comparable(piece) and _moves_alike(piece, trained, placed):
                    rows[_key(piece)][rank] = number
        found += list(_compared(tables, rows, placed=placed))
    return tuple(found)


def _compared(
    tables: Sequence[Table], rows: Mapping[Hashable, Mapping[int, int]], *, placed: bool
) -> Iterator[Comparison]:
    by_ranks: dict[tuple[int, ...], list[tuple[int, ...]]] = defaultdict(list)
    for held in rows.values():
        if len(held) > 1:
            by_ranks[tuple(held)].append(tuple(held.values()))
    for ranks, numbers in by_ranks.items():
        pieces = [tables[ranks[0]].pieces[row[0]] for row in numbers]
        names = tuple(piece.name for piece in pieces)
        kept = np.array([bool(_OPTIMIZER.match(name)) for name in names])
        moments = kept & np.array([math.prod(piece.shape) > 1 for piece in pieces])
        telling = None if placed else kept
        yield Comparison(ranks=ranks, names=names, pieces=np.array(numbers, np.intp), moments=moments, telling=telling)


def _class(table: Table) -> tuple[bool, Hashable]:
    """Equal for replicas: the places of all that a model holds; where none is known, the names."""
    model = frozenset(_key(piece) for piece in table.pieces if piece.parts and not _OPTIMIZER.match(piece.name))
    return (True, model) if model else (False, frozenset(_key(piece) for piece in table.pieces))


def _key(piece: Piece) -> Hashable:
    """Equal for pieces that hold the same elements of the same tensors."""
    places = tuple((p.name, p.shape, p.offset, p.box, p.flat, p.start, p.strides) for p in piece.parts)
    return piece.dtype, piece.shape, places or piece.name


def _comparable(piece: Piece) -> bool:
    return piece.nbytes > 0 and (piece.dtype.startswith(_FLOATS) or bool(_OPTIMIZER.match(piece.name)))


def _moves_alike(piece: Piece, trained: set[str], placed: bool) -> bool:
    """Whether replicas add the same to it. trained: global names of parameters; empty where the optimizer does not tell, as plain SGD."""
    if _OPTIMIZER.match(piece.name):
        return True
    return any(part.name in trained for part in piece.parts) if placed else piece.trained


def _trained(table: Table) -> set[str]:
    """The parameters that an optimizer has a state of."""
    return {
        part.name.split("/", 2)[2]
        for piece in table.pieces
        if _OPTIMIZER.match(piece.name)
        for part in piece.parts
        if part.name.count("/") > 1
    }


def parameters(tables: Sequence[Table]) -> list[Numbers]:
    """Of each table the tensors that training is to change: those that an optimizer names; where none does, all of a model's."""
    trained = set[str]().union(*map(_trained, tables))
    return [
        np.array([n for n, piece in enumerate(table.pieces) if _is_parameter(piece, trained)], np.intp)
        for table in tables
    ]


def _is_parameter(piece: Piece, trained: set[str]) -> bool:
    if _OPTIMIZER.match(piece.name) or not piece.dtype.startswith(_FLOATS):
        return False
    return any(part.name in trained for part in piece.parts) if trained else bool(piece.parts)


@dataclass(frozen=True, kw_only=True)
class Digest:
    """One number for all that one node's ranks hold alike with another's."""

    model: str
    """Equal on nodes whose ranks, one by one, hold the same places of the same tensors."""
    rows: tuple[Numbers, ...]
    """Which of its tensors, by rank."""

    def of(self, words: Sequence[Words]) -> int:
        """48 bits of a snapshot with these fingerprints, rank by rank."""
        mixed = blake2b(digest_size=6)
        for held, rows in zip(words, self.rows, strict=True):
            mixed.update(held[rows].tobytes())
        return int.from_bytes(mixed.digest(), "big")


def digest(tables: Sequence[Table]) -> Digest | None:
    """Of a node's ranks: their trained parameters, and the optimizer's tensors. Of a distributed optimizer, which has other shards on each
    rank, and so does not tell what is trained, all that the model holds alone; where nobody knows places, what
    optimizers name and keep. Integers are left out. None where a rank has nothing of the kind."""
    keys, rows = blake2b(digest_size=6), []
    for table in tables:
        chosen = sorted((repr(_key(table.pieces[n])), n) for n in _replicated(table))
        if not chosen:
            return None
        keys.update(repr([key for key, _ in chosen]).encode())
        rows.append(np.array([n for _, n in chosen], np.intp))
    return Digest(model=keys.hexdigest(), rows=tuple(rows))


def _replicated(table: Table) -> list[int]:
    held = [
        (n, piece) for n, piece in enumerate(table.pieces) if _comparable(piece) and piece.dtype.startswith(_FLOATS)
    ]
    model = [(n, piece) for n, piece in held if piece.parts and not _OPTIMIZER.match(piece.name)]
    if not model:
        return [n for n, piece in held if _moves_alike(piece, set(), placed=False)]
    whole = {(part.name, part.offset, part.box, part.flat) for _, piece in model for part in piece.parts}
    own = [
        (part.name.split("/", 2)[2], part.offset, part.box, part.flat)
        for _, piece in held
        if _OPTIMIZER.match(piece.name)
        for part in piece.parts
        if part.name.count("/") > 1
    ]
    if not any(_OPTIMIZER.match(piece.name) for _, piece in held):
        return []  # nothing tells which of it is trained
    if not own or not whole.issuperset(own):
        return [n for n, _ in model]
    trained = {name for name, *_ in own}
    return [n for n, p in held if _OPTIMIZER.match(p.name) or any(part.name in trained for part in p.parts)]


class Ledger:
    """What has been seen of one layout, comparison by comparison: the last value that all ranks held, how many different ones in a row,
    and what is left out for good. It changes by `look` alone, by what it is shown."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.comparisons = comparisons(tables)
        self._alike = [np.zeros(len(each.names), np.uint64) for each in self.comparisons]
        self._values = [np.zeros(len(each.names), np.intp) for each in self.comparisons]
        self._apart = [np.zeros(len(each.names), np.bool_) for each in self.comparisons]
        self.parted = False
        """In what was looked at last, no trusted moment was alike: the ranks have trained each by itself."""

    def look(self, words: Sequence[Words]) -> list[Apart]:
        """What of the snapshot with these fingerprints, rank by rank, was the same before and is not any more."""
        found: list[Apart] = []
        moments: list[bool] = []
        for number, each in enumerate(self.comparisons):
            held = _held(each, words)
            alike = (held == held[:, :1]).all(axis=1)
            trusted = self._trusted(number)
            moments += alike[trusted & each.moments].tolist()
            found += [
                Apart(name=each.names[row], words=dict(zip(each.ranks, held[row].tolist(), strict=True)))
                for row in np.flatnonzero(trusted & ~alike).tolist()
            ]
            self._apart[number] |= ~alike & (self._values[number] < TRUSTED)
            moved = alike & ((self._values[number] == 0) | (held[:, 0] != self._alike[number]))
            self._values[number] += moved
            self._alike[number] = np.where(alike, held[:, 0], self._alike[number])
        self.parted = bool(moments) and not any(moments)
        return found

    def leave(self) -> None:
        """Trust nothing any more."""
        for apart in self._apart:
            apart[:] = True

    def value(self, name: str, ranks: Sequence[int], words: Sequence[Words]) -> int | None:
        """The fingerprint of that tensor where those ranks all hold the same; None otherwise."""
        for each in self.comparisons:
            if each.ranks == tuple(ranks) and name in each.names:
                row = set(_held(each, words)[each.names.index(name)].tolist())
                return row.pop() if len(row) == 1 else None
        return None

    @property
    def compared(self) -> int:
        """How many tensors are trusted by now."""
        return sum(int(self._trusted(number).sum()) for number in range(len(self.comparisons)))

    @property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """The ranks among which trusted tensors are compared, set by set."""
        return tuple(each.ranks for number, each in enumerate(self.comparisons) if self._trusted(number).any())

    def _trusted(self, number: int) -> NDArray[np.bool_]:
        trusted = (self._values[number] >= TRUSTED) & ~self._apart[number]
        telling = self.comparisons[number].telling
        if telling is not None and not (telling.any() and trusted[telling].all()):
            return np.zeros_like(trusted)
        return trusted


def _held(each: Comparison, words: Sequence[Words]) -> Words:
    columns = [words[rank][each.pieces[:, place]] for place, rank in enumerate(each.ranks)]
    return np.stack(columns, axis=1)
