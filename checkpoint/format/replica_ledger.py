"""Compares replicas snapshot by snapshot, and reports the tensors that diverge. Pure.

A tensor is trusted once it has had TRUSTED different values in a row, each equal on all ranks. A tensor that differs before it is trusted
differs on purpose (statistics of a batch, parameters that are gathered later) and is never compared again. So a finding always means that
the ranks' bits were the same and no longer are. If most moments of the optimizer differ before they are trusted, the ranks train
independently, as in local SGD. No tensor of independently training ranks is trusted: their parameters may be equal at some snapshots only.
Not detected: tensors that never change, and faults in a tensor that is not trusted yet.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .replica_agreement import Comparison, Words, comparisons
from .tensor_table import Table

TRUSTED = 4
"""How many different values in a row, each equal on all ranks, make a tensor trusted. The first is the initial one (zeros, ones); each
further one shows that the ranks change it identically."""


@dataclass(frozen=True, kw_only=True)
class Apart:
    """A tensor that was equal on some ranks and no longer is."""

    name: str
    words: Mapping[int, int]
    """The tensor's fingerprint by rank (index into the list of tables)."""


class Ledger:
    """What the snapshots of one layout have shown so far. For each comparison, the ledger has the last value that all ranks had, the number
    of different values in a row, and which tensors are no longer compared. Only `look` and `leave` change the ledger."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.comparisons = comparisons(tables)
        self._alike = [np.zeros(len(each.names), np.uint64) for each in self.comparisons]
        self._values = [np.zeros(len(each.names), np.intp) for each in self.comparisons]
        self._apart = [np.zeros(len(each.names), np.bool_) for each in self.comparisons]
        self.parted = False
        """Whether no trusted moment (optimizer tensor) was equal in the last snapshot passed to `look`: each rank has trained
        independently."""
        self.early: tuple[str, ...] = ()
        """Moments (optimizer tensors) that differed in the last snapshot passed to `look`, for the first time, and were not trusted yet."""

    def look(self, words: Sequence[Words]) -> list[Apart]:
        """Return the trusted tensors that differ between ranks in the snapshot with these fingerprints, which are given rank by rank."""
        found: list[Apart] = []
        moments: list[bool] = []
        early: list[str] = []
        for number, each in enumerate(self.comparisons):
            held = _held(each, words)
            alike = (held == held[:, :1]).all(axis=1)
            trusted = self._trusted(number)
            moments += alike[trusted & each.moments].tolist()
            found += [
                Apart(name=each.names[row], words=dict(zip(each.ranks, held[row].tolist(), strict=True)))
                for row in np.flatnonzero(trusted & ~alike).tolist()
            ]
            never = ~alike & (self._values[number] < TRUSTED)
            if each.telling is None:  # else it is not known whether the ranks are replicas
                early += [each.names[row] for row in np.flatnonzero(never & each.moments & ~self._apart[number])]
            self._apart[number] |= never
            moved = alike & ((self._values[number] == 0) | (held[:, 0] != self._alike[number]))
            self._values[number] += moved
            self._alike[number] = np.where(alike, held[:, 0], self._alike[number])
        self.parted, self.early = bool(moments) and not any(moments), tuple(early)
        return found

    def leave(self, names: Collection[str] = ()) -> None:
        """Never trust the tensors `names` again; without names, no tensor at all."""
        for each, apart in zip(self.comparisons, self._apart, strict=True):
            apart |= np.array([not names or name in names for name in each.names], np.bool_)

    def value(self, name: str, ranks: Sequence[int], words: Sequence[Words]) -> int | None:
        """Return the fingerprint of the tensor `name` if all of `ranks` have the same; None otherwise."""
        for each in self.comparisons:
            if each.ranks == tuple(ranks) and name in each.names:
                row = set(_held(each, words)[each.names.index(name)].tolist())
                return row.pop() if len(row) == 1 else None
        return None

    @property
    def blind(self) -> bool:
        """Whether nothing is compared any more, although ranks are known to be replicas."""
        known = [number for number, each in enumerate(self.comparisons) if each.telling is None]
        return bool(known) and all(self._apart[number].all() or self._independent(number) for number in known)

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
        if self._independent(number):
            return np.zeros_like(trusted)
        if telling is not None and not (telling.any() and trusted[telling].all()):
            return np.zeros_like(trusted)
        return trusted

    def _independent(self, number: int) -> bool:
        moments = self.comparisons[number].moments
        return bool(2 * (self._apart[number] & moments).sum() > moments.sum())


def _held(each: Comparison, words: Sequence[Words]) -> Words:
    columns = [words[rank][each.pieces[:, place]] for place, rank in enumerate(each.ranks)]
    return np.stack(columns, axis=1)
