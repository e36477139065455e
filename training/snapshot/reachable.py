"""Which steps this rank can go back to: those that are sealed in memory, and those on disk."""

from __future__ import annotations

import math

from ...checkpoint.arena.arena import RankArena, State
from ...checkpoint.backend import place
from ...checkpoint.durable import catalog
from ...resilience.errors import MachineError


class Reachable:
    """What other ranks can go back to may be older, or less."""

    def __init__(self, arena: RankArena, snapshots: str) -> None:
        """snapshots: the address of those on disk."""
        self._arena, self._snapshots = arena, snapshots

    def newest(self, at_most: int) -> int:
        """The newest step up to `at_most` that is sealed in memory, or else on disk; -1 for none. What other ranks have may be older."""
        for kept in (self._in_memory, self._on_disk):
            if older := [step for step in kept() if step <= at_most]:
                return max(older)
        return -1

    def oldest(self, at_least: float) -> float:
        """The oldest step from `at_least` on that is sealed in memory or on disk; infinite for none. As above."""
        kept = (*self._in_memory(), *self._on_disk())
        return min((step for step in kept if step >= at_least), default=math.inf)

    def keeps(self, step: int) -> bool:
        """Whether this rank can go back to `step`, from memory or disk."""
        return step in self._in_memory() or step in self._on_disk()

    def _in_memory(self) -> list[int]:
        headers = [slot.header() for slot in self._arena.slots]
        return [header.step for header in headers if header.state in (State.SEALED, State.LIVE)]

    def _on_disk(self) -> list[int]:
        """None where storage does not answer."""
        try:
            return [a.stamp.step for a in catalog.look(place.at(self._snapshots)).durable]
        except MachineError:
            return []
