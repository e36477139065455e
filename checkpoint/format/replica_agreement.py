"""Finds the tensors that must have the same bits on data-parallel replicas. Pure.

tables of ranks → `comparisons`: which ranks must hold the same bits → `replica_ledger.Ledger.look`, snapshot by snapshot → `Apart`: tensors
that diverged → `wrong`: the ranks in the minority

The tables show which ranks are replicas. Ranks with the same parts of all the model's tensors are data-parallel replicas. Data-parallel
replicas have the same bits, because all of them add the same reduced gradients. Tensor- and expert-parallel ranks share some tensors too.
No framework promises that these stay equal to the last bit, so they are not compared. If the optimizer shows which tensors it trains, a
model's other tensors are not compared either. For example, DistributedDataParallel makes a BatchNorm's statistics equal in each forward
pass, and the next batch makes them differ. So the statistics may be equal in all snapshots that follow an evaluation, and differ in other
snapshots. If the parts are unknown (a bare module given to `Session`), ranks whose tables name the same tensors may be replicas. Such ranks
count as replicas once all of their optimizers' tensors have changed identically. From then on, the program compares the optimizers' tensors
and the parameters that optimizers name.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .sharding import Part
from .tensor_table import Piece, Table

Words: TypeAlias = NDArray[np.uint64]
Numbers: TypeAlias = NDArray[np.intp]
NONE: Numbers = np.zeros(0, np.intp)

_OPTIMIZER = re.compile(r"[^/]+/\d+/(state|main)/")
"""Matches the names of an optimizer's tensors, which `training/state/optimizers/optimizers.py` creates."""
_FLOATS = ("float", "bfloat", "complex")
"""Of a model's tensors, only those whose dtype begins with one of these prefixes are compared. Integers are counters, which may be equal
for a long time and later differ with the data."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Ranks that must hold the same bits of some tensors."""

    ranks: tuple[int, ...]
    """Indexes into the list of tables."""
    names: tuple[str, ...]
    """The tensors' names."""
    pieces: Numbers
    """The tensors' numbers in the tables: one row per tensor, one column per rank."""
    moments: NDArray[np.bool_]
    """Marks the rows that an optimizer computes from gradients: its tensors, except single numbers, which count steps."""
    telling: NDArray[np.bool_] | None = None
    """If parts are unknown: marks an optimizer's rows. No row is trusted until all of the marked rows are. None: parts are known."""


def wrong(words: Mapping[int, int]) -> frozenset[int] | None:
    """Return the ranks whose value differs from that of the majority (more than half of all ranks). Return None if there is no majority;
    two ranks that differ never have one."""
    if not words:
        return frozenset()
    (word, votes), *_ = Counter(words.values()).most_common(1)
    if 2 * votes <= len(words):
        return None
    return frozenset(rank for rank, found in words.items() if found != word)


def convicted(words: Mapping[int, int], right: int) -> frozenset[int] | None:
    """Return the ranks whose value was not `right`, the value that a replay computed on all ranks. Return None if no rank had `right`."""
    if right not in words.values():
        return None
    return frozenset(rank for rank, found in words.items() if found != right)


def comparisons(tables: Sequence[Table]) -> tuple[Comparison, ...]:
    """Return what to compare among ranks with these tables; an empty tuple if no two ranks are replicas."""
    classes: dict[tuple[bool, Hashable], list[int]] = defaultdict(list)
    for rank, table in enumerate(tables):
        classes[_class(table)].append(rank)
    found = []
    for (placed, _), ranks in classes.items():
        if len(ranks) < 2:
            continue
        rows: dict[Hashable, dict[int, int]] = defaultdict(dict)
        told = [trained_by(tables[rank]) for rank in ranks]
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
    """Return a key that replicas share: the parts of all of the model's tensors or, if no part is known, the tensors' names."""
    model = frozenset(_key(piece) for piece in table.pieces if piece.parts and not _OPTIMIZER.match(piece.name))
    return (True, model) if model else (False, frozenset(_key(piece) for piece in table.pieces))


def _key(piece: Piece) -> Hashable:
    """Return a key that is equal for pieces with the same elements of the same tensors."""
    places = tuple((p.name, p.shape, p.offset, p.box, p.flat, p.start, p.strides) for p in piece.parts)
    return piece.dtype, piece.shape, places or piece.name


def is_optimizer_s(piece: Piece) -> bool:
    """Return whether the piece belongs to an optimizer."""
    return bool(_OPTIMIZER.match(piece.name))


def _comparable(piece: Piece) -> bool:
    return piece.nbytes > 0 and (piece.dtype.startswith(_FLOATS) or is_optimizer_s(piece))


def _moves_alike(piece: Piece, trained: set[str], placed: bool) -> bool:
    """Return whether replicas update the piece in the same way. trained: global names of parameters; empty if the optimizer (plain SGD,
    say) does not show them."""
    if _OPTIMIZER.match(piece.name):
        return True
    return any(part.name in trained for part in piece.parts) if placed else piece.trained


def trained_by(table: Table) -> set[str]:
    """Return the names of the parameters for which an optimizer has state."""
    return {name for name, _ in _trained_parts(table.pieces)}


def _trained_parts(pieces: Iterable[Piece]) -> Iterator[tuple[str, Part]]:
    """Yield the parts of an optimizer's tensors, each with its parameter's name."""
    for piece in pieces:
        if _OPTIMIZER.match(piece.name):
            yield from ((part.name.split("/", 2)[2], part) for part in piece.parts if part.name.count("/") > 1)


def parameters(tables: Sequence[Table]) -> list[Numbers]:
    """Return, for each table, the numbers of the tensors that training should change: those that an optimizer names. If no optimizer names
    any, return all tensors of a model."""
    trained = set[str]().union(*map(trained_by, tables))

    def is_parameter(piece: Piece) -> bool:
        if _OPTIMIZER.match(piece.name) or not piece.dtype.startswith(_FLOATS):
            return False
        return any(part.name in trained for part in piece.parts) if trained else bool(piece.parts)

    return [np.array([n for n, piece in enumerate(each.pieces) if is_parameter(piece)], np.intp) for each in tables]


@dataclass(frozen=True, kw_only=True)
class Digest:
    """Computes one number over all bits of a node's ranks that replicas on another node must have too."""

    model: str
    """Equal on two nodes if each rank of one has the same parts of the same tensors as its counterpart on the other."""
    rows: tuple[Numbers, ...]
    """Numbers of the tensors to include, by rank."""

    def of(self, words: Sequence[Words]) -> int:
        """Return 48 bits for the snapshot with these fingerprints, which are given rank by rank."""
        mixed = blake2b(digest_size=6)
        for held, rows in zip(words, self.rows, strict=True):
            mixed.update(held[rows].tobytes())
        return int.from_bytes(mixed.digest(), "big")


def digest(tables: Sequence[Table]) -> Digest | None:
    """Return the digest of a node's ranks: over their trained parameters and the optimizer's tensors. A distributed optimizer has different
    shards on each rank, so it does not show which tensors are trained. With such an optimizer, the digest covers exactly the model. If the
    parts are unknown, it covers the parameters that optimizers name and the tensors that optimizers keep. The digest does not cover
    integers. Return None if a rank has no such tensor."""
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
    own = [(name, part.offset, part.box, part.flat) for name, part in _trained_parts(piece for _, piece in held)]
    if not any(_OPTIMIZER.match(piece.name) for _, piece in held):
        return []  # nothing shows which tensors are trained
    if not own or not whole.issuperset(own):
        return [n for n, _ in model]
    trained = {name for name, *_ in own}
    return [n for n, p in held if _OPTIMIZER.match(p.name) or any(part.name in trained for part in p.parts)]
