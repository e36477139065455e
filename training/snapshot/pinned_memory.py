"""Prepare a slot's memory for copies from a device: grow it, map it, and register it piece by piece. A copy waits only for the pieces that
contain its bytes.

On an H200's host, growing takes 0.2 s for 1 GB, and mapping its pages 0.5 s. Registering takes 0.04 s, or 0.4 s if the pages are not mapped
yet. A large state takes seconds, so a thread does this work (`device_copy.py`).
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from ...checkpoint.arena.slot import Slot, image_offset
from ...checkpoint.arena.slot_header import Header
from ...checkpoint.format.shard_image import STRIDE_BYTES
from ...resilience.clock import monotonic_s, sleep
from .. import device

PIECE_BYTES = 16 * STRIDE_BYTES
"""The bytes registered in one call, counted from the image's start. No chunk lies in two pieces, because a copy must not cross pieces."""
_REST = 3.0
"""How many times as long as it takes to register a piece the thread rests after it. The loop can't launch kernels while the runtime
registers memory. A loop that launches kernels all the time thus takes a third longer, and other loops less."""
END_S = 1.0
"""Seconds that the end of the loop, or of the process, waits for a thread."""


class Pinned:
    """The memory of one slot, as mapped in this process. One thread prepares the memory, and others wait for it."""

    def __init__(self, kind: str, slot: Slot) -> None:
        """kind: the device type."""
        self._kind, self._slot = kind, slot
        self._preparing = threading.Lock()
        self._memory: memoryview | None = None
        self._pieces: list[memoryview | None] = []
        """The registered pieces. None stands for a piece that the runtime refused to register."""
        self._turn = threading.Condition()
        self._ready_bytes = 0
        self._failed = self._stopped = False
        self._head_bytes = 0
        """The number of bytes before the image."""

    def prepare(self, wanted: Header, table_bytes: int, quiet: Callable[[], None] | None = None) -> None:
        """Allocate memory for such a snapshot and register it. quiet: called before each piece, and returns when registering it disturbs no
        copies; None: the loop waits for this memory, so do not pause. Raises MachineError if there is too little memory."""
        try:
            with self._preparing:
                self._prepare(wanted, table_bytes, quiet)
        except BaseException:
            with self._turn:
                self._failed = True
                self._turn.notify_all()
            raise

    def stop(self) -> None:
        """Let `prepare` register no further piece, in any thread."""
        self._stopped = True

    def release(self) -> None:
        """Unregister the memory."""
        with self._preparing:
            self._release()

    def _prepare(self, wanted: Header, table_bytes: int, quiet: Callable[[], None] | None) -> None:
        head_bytes, memory = self._slot.reserve(wanted, table_bytes)
        if self._memory is None or device.address(memory) != device.address(self._memory):
            self._release()
        self._memory = memory
        self._head_bytes = head_bytes  # after the release: `ready` must not see the new head with the old memory
        if self._ready_bytes >= len(memory):
            return  # register nothing again, because copies may be running
        for start in range(self._ready_bytes // PIECE_BYTES * PIECE_BYTES, len(memory), PIECE_BYTES):
            if self._stopped:
                return
            piece = memory[start : start + PIECE_BYTES]
            if quiet:
                device.populate(piece)
                quiet()
            began_s = monotonic_s()
            self._replace(start // PIECE_BYTES, piece)
            took_s = monotonic_s() - began_s
            with self._turn:
                self._ready_bytes = start + len(piece)
                self._turn.notify_all()
            sleep(_REST * took_s if quiet else 0.0)

    def ready(self, wanted: Header, table_bytes: int) -> bool:
        """Whether this slot can store such a snapshot immediately."""
        fits = self._head_bytes >= image_offset(table_bytes, wanted.pieces)
        return fits and self._ready_bytes >= wanted.image.memory_bytes

    def wait(self, nbytes: int) -> None:
        """Wait until the first `nbytes` of the image are ready, or preparing failed. Copies to unregistered memory also work, but block."""
        with self._turn:
            self._turn.wait_for(lambda: self._failed or self._ready_bytes >= nbytes)

    def _replace(self, number: int, piece: memoryview) -> None:
        """Register `piece`, in place of the shorter last piece of a smaller image."""
        if number < len(self._pieces):
            self._unregister(self._pieces.pop())
        self._pieces.append(piece if device.register(self._kind, piece) else None)

    def _release(self) -> None:
        self._ready_bytes, pieces, self._pieces = 0, self._pieces, []
        for piece in pieces:
            self._unregister(piece)

    def _unregister(self, piece: memoryview | None) -> None:
        if piece is not None:
            device.unregister(self._kind, piece)


class Worker:
    """A thread that ends with the loop, or with the process. A thread that is inside torch when Python (up to 3.13) exits aborts the
    process."""

    def __init__(self, work: Callable[[], None], requests: SimpleQueue[Any], *prepared: Pinned) -> None:
        """work: ends when it gets None from `requests`. prepared: the memory that it prepares."""
        self._work, self._requests, self._prepared = work, requests, prepared
        self._thread = threading.Thread(target=self._run, name=f"mt-resilient{work.__name__}", daemon=True)
        atexit.register(self.close)
        try:
            self._thread.start()
        except RuntimeError:  # the process may start no further thread
            atexit.unregister(self.close)
            raise

    def close(self) -> bool:
        """Let the thread end after the present requests. Return whether it has ended."""
        self._requests.put(None)
        for pinned in self._prepared:
            pinned.stop()
        self._thread.join(END_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._work()
        finally:
            atexit.unregister(self.close)
