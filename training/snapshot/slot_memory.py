"""Prepares the memory of a rank's slots, on a thread: the loop does not wait until seconds of mapping and registering are over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from queue import SimpleQueue

import torch

from ...checkpoint.arena.slot import Slot, image_offset
from ...checkpoint.arena.slot_header import Header
from ...resilience.clock import monotonic_s, sleep
from ...resilience.errors import MachineError
from .. import device
from . import early_memory
from .pinned_memory import Pinned, Worker

_FIRST_S = 0.5
"""Seconds that the first snapshot waits for its memory. With a large state, this is not long enough, and the rank misses the snapshot."""
_LOOK_S = 0.005
"""Seconds between two checks whether memory is ready."""
_LARGE_BYTES = 1 << 30
"""The least size of a state whose memory takes longer than a step to prepare."""


class SlotMemory:
    def __init__(self, where: torch.device, slots: Sequence[Slot], quiet: Callable[[], None]) -> None:
        """quiet: returns when no copies run. While copies run, a registration delays each of them, and so the optimizer, which waits for
        them."""
        self._device, self._quiet = where, quiet
        self.pinned = {slot: early_memory.pinned(where.type, slot) for slot in slots}
        self._rooms: SimpleQueue[tuple[Header, int, list[Pinned], bool] | None] = SimpleQueue()
        self._largest_bytes = 0
        """The bytes of the largest snapshot's image so far."""
        self._prepared = (0, 0)
        """The bytes of the largest image for which memory was requested, and the bytes that precede the image in its slot."""
        self._again = False
        """Whether the last request for memory failed."""
        self.starved = False
        """Whether there was too little memory for a slot."""
        self._worker = Worker(self._make_room, self._rooms, *self.pinned.values())

    def ready(self, wanted: Header, table_bytes: int, stride: int) -> Collection[Slot]:
        """Return the slots that can store such a snapshot now. The thread prepares missing memory meanwhile. If the state has just grown,
        wait up to `_FIRST_S`: the memory of a small state is ready before the step ends. A large state gets memory only once it has stopped
        growing: it grows by the optimizer's state in the first step, and shrinks by the gradients in the second.

        stride: the number of steps between two snapshots. With a stride of more than 1, a large state gets memory at once."""
        until_s = 0.0
        asked = (wanted.image.memory_bytes, image_offset(table_bytes, wanted.pieces))
        steady = stride > 1 or asked[0] < _LARGE_BYTES or asked[0] <= self._largest_bytes
        self._largest_bytes = max(self._largest_bytes, asked[0])
        larger = steady and (asked[0] > self._prepared[0] or asked[1] > self._prepared[1])
        if larger or self._again:
            self._prepared, self._again = asked, False
            self._rooms.put((wanted, table_bytes, list(self.pinned.values()), True))
            until_s = monotonic_s() + _FIRST_S if larger else 0.0
        while True:
            ready = [slot for slot, pinned in self.pinned.items() if pinned.ready(wanted, table_bytes)]
            if ready or monotonic_s() > until_s:
                return ready
            sleep(_LOOK_S)

    def prepare(self, slot: Slot, wanted: Header) -> Pinned:
        """Return the slot's memory, which the thread registers without pauses."""
        self._rooms.put((wanted, wanted.table_bytes, [self.pinned[slot]], False))
        return self.pinned[slot]

    def close(self) -> None:
        """End the thread."""
        self._worker.close()

    def _make_room(self) -> None:
        device.module(self._device.type).set_device(self._device)
        with suppress(Exception):
            device.allow_capture(self._device.type)  # registering memory would break a capture in the loop's thread
        for wanted, table_bytes, chosen, considerate in iter(self._rooms.get, None):
            for pinned in chosen:
                try:
                    pinned.prepare(wanted, table_bytes, self._quiet if considerate else None)
                except MachineError:  # the next snapshot requests memory again
                    self._again = self.starved = True
