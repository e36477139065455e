"""Chooses the writer of a slab (the file with one rank's tensors): tensorstore, or a stream of direct I/O. In a directory, both write the
same bytes, and a trial shows which is faster there. In an object store, tensorstore writes."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import TypeAlias

import numpy as np

from ...resilience import clock
from ...resilience.errors import ResilientError
from ..arena.arena import View
from ..arena.slot_header import Header
from ..backend import paths
from ..backend.filesystem import Files, make_directory, own_directory
from ..backend.object_store import Objects
from ..backend.place import Place
from ..format.shard_image import CHUNK_BYTES, PAGE_BYTES, Image
from . import direct_io, zarr_slab

Writer: TypeAlias = Callable[[Place, View, Sequence[int]], list[int]]
"""Writes some chunks of the view (ascending) as a new slab at that place, durable except for the directories. Returns each chunk's
checksum. Several threads may call it, each for another slab. Raises MachineError, SnapshotError or OSError."""

TRIAL_BYTES = 4 * CHUNK_BYTES
"""Bytes of one trial. tensorstore writes smaller slabs, because a faster writer would gain nothing there."""
_MARK = ".trial-"
_BURST_S = 0.05
"""A rate-limited stream may run ahead of its limit by this many seconds."""


def writer(root: Place, bytes_per_s: float = 0.0) -> Writer:
    """Return the writer for slabs under `root`. bytes_per_s: rate limit for all slabs together; 0: no limit."""
    return Fastest(root, bytes_per_s) if isinstance(root, Files) else partial(_put, Pace(bytes_per_s))


def by_tensorstore(slab: Place, view: View, chunks: Sequence[int]) -> list[int]:
    """Write a slab into a directory with tensorstore."""
    assert isinstance(slab, Files)
    return zarr_slab.write(slab, view.memory, view.header.image, chunks)


class Pace:
    """A rate limit that all threads share. A call waits until `nbytes` more bytes may be written."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._free_at_s = 0.0
        self._lock = Lock()

    def __call__(self, nbytes: int) -> None:
        if not self._rate:
            return
        with self._lock:
            now = clock.monotonic_s()
            self._free_at_s = free_at_s = max(self._free_at_s, now - _BURST_S) + nbytes / self._rate
        if free_at_s > now:
            clock.sleep(free_at_s - now)


def _put(pace: Pace, slab: Place, view: View, chunks: Sequence[int]) -> list[int]:
    """Write a slab into an object store."""
    assert isinstance(slab, Objects)
    return zarr_slab.put(slab, view.memory, view.header.image, chunks, pace)


class Direct:
    """Writes slabs into a directory, as one stream that bypasses the page cache."""

    def __init__(self, bytes_per_s: float = 0.0) -> None:
        self._pace = Pace(bytes_per_s)

    def __call__(self, slab: Place, view: View, chunks: Sequence[int]) -> list[int]:
        assert isinstance(slab, Files)
        zarr_slab.create(slab, view.header.image)
        if not chunks:
            return []
        shard = slab.path / zarr_slab.SHARD
        shard.parent.mkdir(parents=True)
        return direct_io.write(shard, view.memory, view.header.image, chunks, self._pace)


class Fastest:
    """The faster writer under `root`. Before the first slab that is large enough to matter, a trial shows which of the two writers is
    faster. With a rate limit, the stream is chosen, because tensorstore has no such limit. If the trial fails (a full disk), tensorstore is
    chosen, which will report the reason."""

    def __init__(self, root: Files, bytes_per_s: float = 0.0) -> None:
        self._root = root
        self._stream = Direct(bytes_per_s)
        self._chosen: Writer | None = self._stream if bytes_per_s else None
        self._choosing = Lock()

    def __call__(self, slab: Place, view: View, chunks: Sequence[int]) -> list[int]:
        with self._choosing:
            if self._chosen is None and len(chunks) * view.header.image.chunk_bytes >= TRIAL_BYTES:
                self._chosen = self._trial()
        return (self._chosen or by_tensorstore)(slab, view, chunks)

    def _trial(self) -> Writer:
        memory = memoryview(mmap.mmap(-1, Image(TRIAL_BYTES).memory_bytes))
        memory[::PAGE_BYTES] = b"\1" * (len(memory) // PAGE_BYTES)
        view = View(
            header=Header(payload_bytes=TRIAL_BYTES), table=b"", fingerprints=np.zeros(0, np.uint64), memory=memory
        )
        took: dict[Writer, float] = {}
        for writer in (by_tensorstore, self._stream, by_tensorstore, self._stream):
            place = Files(own_directory((self._root / paths.SNAPSHOTS).path, _MARK))
            try:
                make_directory(place.path)
                started = clock.monotonic_s()
                writer(place / "slab", view, range(view.header.image.chunks))
                took[writer] = min(took.get(writer, float("inf")), clock.monotonic_s() - started)
            except (ResilientError, OSError):
                return by_tensorstore
            finally:
                place.clear()
        return min(took, key=lambda writer: took[writer])
