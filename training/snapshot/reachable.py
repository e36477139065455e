"""The snapshots that this rank can restore (those sealed in memory, and those on disk), and those that all ranks can restore."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from ...checkpoint.arena.arena import RankArena, State
from ...checkpoint.arena.slot_header import Stamp
from ...checkpoint.backend import place
from ...checkpoint.durable import catalog
from ...resilience.errors import MachineError


class Reachable:
    """The steps that this rank can restore. Other ranks may have fewer or older steps."""

    def __init__(self, arena: RankArena, snapshots: str, unusable: Collection[str]) -> None:
        """snapshots: the address of the snapshots on disk. unusable: the names of those that must not be restored."""
        self._arena, self._snapshots, self._unusable = arena, snapshots, unusable
        self._cuts: list[tuple[int, tuple[int, int]]] = []
        self._same: dict[Stamp, Stamp] = {}
        """Stamps under which this rank takes a state again that it has just restored, and the stamp of the restored snapshot. Another rank
        may still have the restored snapshot in memory, and then does not take it again."""

    def went_back(self, to: int, life: tuple[int, int], course: tuple[int, ...] = ()) -> None:
        """Note that the ranks went back to step `to`. The agent marks the snapshots on disk that they left, but a full disk may refuse the
        mark. life: as in `Stamp.left`. course: generation and number of rewinds of the snapshot that they restored."""
        self._cuts.append((to, life))
        if course:
            self._same[Stamp(*life, to)] = self.original(Stamp._make((*course, to)))

    def original(self, stamp: Stamp) -> Stamp:
        """Return the stamp that identifies the state in this snapshot on all ranks."""
        return self._same.get(stamp, stamp)

    def newest(self, at_most: int) -> int:
        """Return the newest step up to `at_most` that is sealed in memory. If memory has no such step, return the newest on disk; -1 if
        there is none either. Other ranks may have older steps."""
        for kept in (self._in_memory, self._on_disk):
            if older := [stamp.step for stamp in kept() if stamp.step <= at_most]:
                return max(older)
        return -1

    def oldest(self, at_least: float) -> float:
        """Return the oldest step from `at_least` on that is sealed in memory or on disk; infinite if none. Other ranks may return another
        step."""
        kept = (*self._in_memory(), *self._on_disk())
        return min((stamp.step for stamp in kept if stamp.step >= at_least), default=math.inf)

    def snapshot(self, step: int) -> Stamp | None:
        """Return the snapshot of `step` from which this rank would restore: the newest lineage's in memory, else the newest on disk; None:
        there is none."""
        for kept in (self._in_memory, self._on_disk):
            if found := [stamp for stamp in kept() if stamp.step == step]:
                return max(found)
        return None

    def _in_memory(self) -> list[Stamp]:
        headers = [slot.header() for slot in self._arena.slots]
        return [header.stamp for header in headers if header.state in (State.SEALED, State.LIVE)]

    def _on_disk(self) -> list[Stamp]:
        """Return the committed snapshots. The list is empty if storage does not answer."""
        try:
            found = catalog.look(place.at(self._snapshots)).durable
        except MachineError:
            return []
        usable = [attempt.stamp for attempt in found if str(attempt) not in self._unusable]
        return [stamp for stamp in usable if not any(stamp.left(*cut) for cut in self._cuts)]


class Common:
    """The steps to which all ranks can go back in place. Every method is collective: all ranks call it, in the same order."""

    def __init__(self, reachable: Reachable, greatest: Callable[..., Sequence[float]]) -> None:
        """greatest: returns, for each number, the greatest value of all ranks (`Sentinel.greatest`)."""
        self._reachable, self._greatest = reachable, greatest
        self.courses: dict[int, tuple[int, ...]] = {}
        """For each step that was asked about: generation and number of rewinds of this rank's snapshot."""

    def newest(self, at_most: int) -> int:
        """Return the newest step up to `at_most` that every rank can restore; -1 if there is none."""
        while True:
            highest, least = self._greatest(step := self._reachable.newest(at_most), -step)
            if highest != -least:
                at_most = int(-least)  # one rank has this step; the others may not
            elif step < 0 or self.keeps(step):
                return step
            else:
                at_most = step - 1

    def oldest(self) -> float:
        """Return the oldest step that every rank can restore; infinity if there is none."""
        at_least = 0.0
        while True:
            greatest, least = self._greatest(step := self._reachable.oldest(at_least), -step)
            if greatest != -least:
                at_least = greatest
            elif step == math.inf or self.keeps(int(step)):
                return step
            else:
                at_least = step + 1

    def keeps(self, step: int) -> bool:
        """Whether every rank can restore `step`, and all would restore the same state. Snapshots of one step may be of different lineages:
        ranks that restored different ones would mix them."""
        found = self._reachable.snapshot(step)
        self.courses[step] = () if found is None else found[:2]
        generation, rewinds, _ = (-1, -1, step) if found is None else self._reachable.original(found)
        one, other, minus_one, minus_other = self._greatest(generation, rewinds, -generation, -rewinds)
        return generation >= 0 and (one, other) == (-minus_one, -minus_other)
