"""Finds the tensors of which data-parallel replicas hold the same bits, and reports those that diverge. Pure.

tables of ranks → `comparisons`: which ranks must hold the same bits → `Ledger.look`, snapshot by snapshot → `Apart`: tensors that diverged
→ `wrong`: the ranks in the minority

The tables tell which ranks are replicas. Ranks that hold the same places of all the model's tensors are data-parallel replicas. Their bits
are the same, because all of them add the same reduced gradients. Tensor- and expert-parallel ranks have some tensors in common too. No
framework promises that these stay equal to the last bit, so they are not compared. A model's tensors that no optimizer trains are not
compared either, if the optimizer tells which it trains. DistributedDataParallel, for example, makes a BatchNorm's statistics equal in each
forward pass, and the next batch makes them differ. So they may be equal in all snapshots that follow an evaluation. Where places are
unknown (a bare module given to `Session`), ranks whose tables name the same tensors may be replicas. They count once all of their
optimizers' tensors have moved alike. Compared are then these tensors and the parameters that optimizers name.

A tensor is trusted once it has taken TRUSTED values in a row, each of them equal on all ranks. A tensor that differs earlier differs on
purpose (statistics of a batch, parameters that are gathered later) and is left out for good. So a finding always means: the bits were the
same, and no longer are. Not detected: tensors that never change, and faults in a tensor that is not trusted yet.
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
"""Number of different values in a row. The first is the initial one (zeros, ones); each further one shows that the ranks move together."""

_OPTIMIZER = re.compile(r"[^/]+/\d+/(state|main)/")
"""Names of an optimizer's tensors, as `training/state/optimizers/optimizers.py` gives them."""
_FLOATS = ("float", "bfloat", "complex")
"""Only these dtypes of a model's tensors are compared. Integers are counters: they may be equal for long and differ with the data one
day."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Ranks that hold the same tensors."""

    ranks: tuple[int, ...]
    """Indexes into the list of tables."""
    names: tuple[str, ...]
    """The tensors' names."""
    pieces: Numbers
    """The tensors' numbers in the tables: one row for each tensor, one column for each rank."""
    moments: NDArray[np.bool_]
    """The rows that an optimizer computes from gradients: its tensors, except single numbers, which count steps."""
    telling: NDArray[np.bool_] | None = None
    """Set where places are unknown: no row is trusted until all of these rows are."""


@dataclass(frozen=True, kw_only=True)
class Apart:
    """A tensor that was equal on some ranks and no longer is."""

    name: str
    words: Mapping[int, int]
    """Its fingerprint by rank (index into the list of tables)."""


def wrong(words: Mapping[int, int]) -> frozenset[int] | None:
    """Return the ranks that differ from the value of more than half of all; None without such a majority, as always when two ranks
    differ."""
    if not words:
        return frozenset()
    (word, votes), *_ = Counter(words.values()).most_common(1)
    if 2 * votes <= len(words):
        return None
    return frozenset(rank for rank, found in words.items() if found != word)


def convicted(words: Mapping[int, int], right: int) -> frozenset[int] | None:
    """Return the ranks whose value was not `right`, the value that a replay gave on all ranks; None if no rank had `right`."""
    if right not in words.values():
        return None
    return frozenset(rank for rank, found in words.items() if found != right)


def comparisons(tables: Sequence[Table]) -> tuple[Comparison, ...]:
    """Return what to compare among ranks with these tables; empty if no two of them are replicas."""
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
    """Return a key that replicas share: the places of everything that the model holds or, where no place is known, the names."""
    model = frozenset(_key(piece) for piece in table.pieces if piece.parts and not _OPTIMIZER.match(piece.name))
    return (True, model) if model else (False, frozenset(_key(piece) for piece in table.pieces))


def _key(piece: Piece) -> Hashable:
    """Return a key that is equal for pieces with the same elements of the same tensors."""
    places = tuple((p.name, p.shape, p.offset, p.box, p.flat, p.start, p.strides) for p in piece.parts)
    return piece.dtype, piece.shape, places or piece.name


def _comparable(piece: Piece) -> bool:
    return piece.nbytes > 0 and (piece.dtype.startswith(_FLOATS) or bool(_OPTIMIZER.match(piece.name)))


def _moves_alike(piece: Piece, trained: set[str], placed: bool) -> bool:
    """Return whether replicas update the piece in the same way. trained: global names of parameters; empty if the optimizer does not tell
    them, as plain SGD."""
    if _OPTIMIZER.match(piece.name):
        return True
    return any(part.name in trained for part in piece.parts) if placed else piece.trained


def _trained(table: Table) -> set[str]:
    """Return the names of the parameters for which an optimizer holds state."""
    return {
        part.name.split("/", 2)[2]
        for piece in table.pieces
        if _OPTIMIZER.match(piece.name)
        for part in piece.parts
        if part.name.count("/") > 1
    }


def parameters(tables: Sequence[Table]) -> list[Numbers]:
    """Return for each table the tensors that training is to change: those that an optimizer names or, if no optimizer names any, all of a
    model's."""
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
    """Computes one number over everything that a node's ranks must hold alike with their replicas on another node."""

    model: str
    """Equal on two nodes if each rank of one holds the same places of the same tensors as its counterpart on the other."""
    rows: tuple[Numbers, ...]
    """Numbers of the tensors that count, by rank."""

    def of(self, words: Sequence[Words]) -> int:
        """Return 48 bits for the snapshot with these fingerprints, given rank by rank."""
        mixed = blake2b(digest_size=6)
        for held, rows in zip(words, self.rows, strict=True):
            mixed.update(held[rows].tobytes())
        return int.from_bytes(mixed.digest(), "big")


def digest(tables: Sequence[Table]) -> Digest | None:
    """Return the digest of a node's ranks: over their trained parameters and the optimizer's tensors. A distributed optimizer has other
    shards on each rank, so it does not tell what is trained. Then the digest is over all of the model and nothing else. Where places are
    unknown, it is over what optimizers name and keep. Integers are left out. Return None if a rank has nothing of the kind."""
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
        return []  # nothing tells which tensors are trained
    if not own or not whole.issuperset(own):
        return [n for n, _ in model]
    trained = {name for name, *_ in own}
    return [n for n, p in held if _OPTIMIZER.match(p.name) or any(part.name in trained for part in p.parts)]


class Ledger:
    """What the snapshots of one layout have shown, for each comparison: the last value that all ranks held, the number of different values
    in a row, and the tensors left out for good. Only `look` and `leave` change it."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.comparisons = comparisons(tables)
        self._alike = [np.zeros(len(each.names), np.uint64) for each in self.comparisons]
        self._values = [np.zeros(len(each.names), np.intp) for each in self.comparisons]
        self._apart = [np.zeros(len(each.names), np.bool_) for each in self.comparisons]
        self.parted = False
        """No trusted moment was equal in the last snapshot that `look` saw: each rank has trained by itself."""

    def look(self, words: Sequence[Words]) -> list[Apart]:
        """Return the tensors that were equal before and differ in the snapshot with these fingerprints, given rank by rank."""
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
        """Trust no tensor any more."""
        for apart in self._apart:
            apart[:] = True

    def value(self, name: str, ranks: Sequence[int], words: Sequence[Words]) -> int | None:
        """Return the fingerprint of that tensor if those ranks all hold the same; None otherwise."""
        for each in self.comparisons:
            if each.ranks == tuple(ranks) and name in each.names:
                row = set(_held(each, words)[each.names.index(name)].tolist())
                return row.pop() if len(row) == 1 else None
        return None

    @property
    def compared(self) -> int:
        """The number of tensors that are trusted by now."""
        return sum(int(self._trusted(number).sum()) for number in range(len(self.comparisons)))

    @property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """The sets of ranks among which trusted tensors are compared."""
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
