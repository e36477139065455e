"""The steps that this rank can restore: steps sealed in memory, and steps on disk."""

from __future__ import annotations

import math
from collections.abc import Collection

from ...checkpoint.arena.arena import RankArena, State
from ...checkpoint.backend import place
from ...checkpoint.durable import catalog
from ...resilience.errors import MachineError


class Reachable:
    """The steps that this rank can restore. Other ranks may have fewer or older steps."""

    def __init__(self, arena: RankArena, snapshots: str, unusable: Collection[str]) -> None:
        """snapshots: the address of the snapshots on disk. unusable: the names of those that must not be restored."""
        self._arena, self._snapshots, self._unusable = arena, snapshots, unusable
        self._cuts: list[tuple[int, tuple[int, int]]] = []

    def went_back(self, to: int, life: tuple[int, int]) -> None:
        """Note that the ranks went back to step `to`. The agent marks the snapshots on disk that they left, but a full disk may refuse the
        mark. life: as in `Stamp.left`."""
        self._cuts.append((to, life))

    def newest(self, at_most: int) -> int:
        """Return the newest step up to `at_most` that is sealed in memory. If memory has no such step, return the newest on disk; -1 if
        there is none either. Other ranks may have older steps."""
        for kept in (self._in_memory, self._on_disk):
            if older := [step for step in kept() if step <= at_most]:
                return max(older)
        return -1

    def oldest(self, at_least: float) -> float:
        """Return the oldest step from `at_least` on that is sealed in memory or on disk; infinite if none. Other ranks may return another
        step."""
        kept = (*self._in_memory(), *self._on_disk())
        return min((step for step in kept if step >= at_least), default=math.inf)

    def keeps(self, step: int) -> bool:
        """Whether this rank can restore `step` from memory or disk."""
        return step in self._in_memory() or step in self._on_disk()

    def _in_memory(self) -> list[int]:
        headers = [slot.header() for slot in self._arena.slots]
        return [header.step for header in headers if header.state in (State.SEALED, State.LIVE)]

    def _on_disk(self) -> list[int]:
        """Return the committed steps. The list is empty if storage does not answer."""
        try:
            found = catalog.look(place.at(self._snapshots)).durable
        except MachineError:
            return []
        usable = [attempt.stamp for attempt in found if str(attempt) not in self._unusable]
        return [stamp.step for stamp in usable if not any(stamp.left(*cut) for cut in self._cuts)]
