"""Decides which part of a state is first copied within its device. All other parts are copied directly to the host's memory.

A device copies fifty times as fast within its memory as to the host. The copy within the device (the detour) can go to the host later,
while the optimizer already steps. Only the part that would make the optimizer wait takes the detour, and only if the device has free
memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

_LEFT_FREE = 0.25
"""The share of a device's memory that stays free for the script, whose next step may need more than this one. We chose this share because
measured scripts with less free memory have steps that are longer than their copies."""
_TOLERATED = 0.02
"""The share of the copies' time for which the optimizer may wait. The copy within the device takes as long."""
_MORE = 1.1
"""A factor on the bytes that came too late in the last snapshot. So the next snapshot sends a little more through the detour, and the
optimizer does not wait again."""
_LESS = 0.05
"""After a snapshot for which the optimizer has not waited, this share of its bytes no longer takes the detour. So the effect of a single
slow copy fades."""


class Detour:
    def __init__(self) -> None:
        self._direct_bytes = math.inf
        """How many bytes reach the host before the optimizer steps, according to the last snapshots."""
        self._taken_bytes = 0
        """The bytes that took the detour last time. torch's allocator may still hold them for the next time. The allocator gives the
        detour's memory to the script if nothing else is free."""
        self._refused = self._cut = False
        """`_refused`: whether nothing may take the detour any more. `_cut`: whether fewer bytes took it last time than should have."""

    def refused(self) -> None:
        """Record that the device had no memory for the detour. Nothing takes it any more, because the script may need all memory."""
        self._refused, self._taken_bytes = True, 0

    def waited(self, seconds: float, took_s: float, nbytes: int) -> None:
        """Record that the optimizer has waited `seconds` for a snapshot whose copies of `nbytes` bytes took `took_s` seconds in all."""
        if took_s <= 0 or self._cut:
            return
        if seconds > _TOLERATED * took_s:
            direct = min(self._direct_bytes, nbytes - self._taken_bytes)
            self._direct_bytes = max(0.0, direct - _MORE * seconds * nbytes / took_s)
        elif nbytes > self._direct_bytes:  # fewer bytes show nothing: most were copied before the loop went on
            direct = self._direct_bytes + _LESS * nbytes
            self._direct_bytes = direct if direct < nbytes else math.inf

    def divide(self, sizes: Sequence[int], memory: Callable[[], tuple[int, int, int]]) -> list[bool]:
        """Return which tensors take the detour. sizes: the tensors' bytes. memory: returns the free and the total bytes of the device's
        memory, and the bytes that torch's allocator holds unused."""
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
