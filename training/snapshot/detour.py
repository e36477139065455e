"""Which part of a state is first copied within its device. The rest goes to the host's memory directly.

A device copies fifty times as fast within its memory as to the host. What is set aside there can be copied to the host later, while the
optimizer steps already. So only that part takes the detour which would make the optimizer wait, and only where the device has free memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

_LEFT_FREE = 0.25
"""The share of a device's memory that stays free for the script, whose next step may need more than this one. Our choice: measured scripts
with less free memory have steps that are longer than their copies."""
_TOLERATED = 0.02
"""The share of a snapshot's copies for which the optimizer may wait. The copy within the device takes as long."""
_MORE = 1.1
"""A little more takes the detour than the last snapshot has shown, so that the next one already does not wait."""
_LESS = 0.05
"""The share of a snapshot that no longer takes the detour after one for which the optimizer has not waited. One slow copy is no rule."""


class Detour:
    def __init__(self) -> None:
        self._direct_bytes = math.inf
        """How many bytes reach the host before the optimizer steps."""
        self._taken_bytes = 0
        """The bytes that took the detour last time. torch's allocator may still hold them for the next time. It gives them to the script if
        nothing else is free."""
        self._refused = self._cut = False
        """Whether nothing may take the detour any more; and whether less took it last time than should."""

    def refused(self) -> None:
        """Record that the device had no memory for the detour. Nothing takes it any more, because the script may need all memory."""
        self._refused, self._taken_bytes = True, 0

    def waited(self, seconds: float, took_s: float, nbytes: int) -> None:
        """Record that the optimizer has waited for a snapshot whose copies, of so many bytes, took `took_s` seconds in all."""
        if took_s <= 0 or self._cut:
            return
        if seconds > _TOLERATED * took_s:
            direct = min(self._direct_bytes, nbytes - self._taken_bytes)
            self._direct_bytes = max(0.0, direct - _MORE * seconds * nbytes / took_s)
        else:
            direct = self._direct_bytes + _LESS * nbytes
            self._direct_bytes = direct if direct < nbytes else math.inf

    def divide(self, sizes: Sequence[int], memory: Callable[[], tuple[int, int, int]]) -> list[bool]:
        """Return which tensors, of these bytes, take the detour. memory: returns the free and all bytes of the device's memory, and those
        that torch's allocator holds unused."""
        asks = sum(sizes) > self._direct_bytes and not self._refused
        free, total, unused = memory() if asks else (0, 0, 0)
        spare = free - _LEFT_FREE * total
        room = spare + min(self._taken_bytes, unused) if spare > 0 else 0.0
        found: list[bool] = []
        direct, self._taken_bytes, self._cut = 0, 0, False
        for size in sizes:
            late = direct + size > self._direct_bytes
            away = late and self._taken_bytes + size <= room
            self._cut |= late and not away
            found.append(away)
            direct, self._taken_bytes = direct + size * (not away), self._taken_bytes + size * away
        return found
