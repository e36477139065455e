"""One slot (shared memory for one rank's part of one snapshot) as one process sees it: mapped, grown, locked, and described by its header.

Other processes open a slot through /proc/<agent pid>/fd/<n>. So each process has its own open file description, and the kernel's locks keep
readers and the writer apart. The writing rank has the exclusive lock from `begin` to `staged`; a reader has the shared lock. The kernel
releases both when their process ends. So a slot in state STAGING without a lock is torn (half written).

Layout of a slot: one header page | table (JSON) | one fingerprint per tensor | image of the shard file, which starts on a page. The writer
stores the state last, as one aligned word.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...resilience.errors import MachineError, SnapshotError
from ...resilience.ipc.descriptor_client import opened
from ...resilience.ipc.file_descriptors import high
from ...resilience.ipc.shared_memory import allocate, allocated, mapped
from ..format.shard_image import PAGE_BYTES, pages
from ..format.tensor_table import Table
from .memory_limits import bytes_for_slot
from .slot_header import DRAINED_OFFSET, DURABLE_OFFSET, HEADER_BYTES, STATE_OFFSET, Header, State

_LOOKS = 1000
"""How many times the header is read if it keeps changing. A slot whose header changes at every read counts as empty: no process of this
program changes a header so often."""


@dataclass(frozen=True, kw_only=True)
class View:
    """The memory of a slot, while this process holds the slot's lock. The writer fills it. A reader copies data out of it, and writes only
    checksums into it."""

    header: Header
    table: bytes
    fingerprints: NDArray[np.uint64]
    memory: memoryview
    """The image, laid out as `header.image` says."""

    def chunks(self) -> Iterator[tuple[int, memoryview]]:
        image = self.header.image
        return ((index, image.chunk(self.memory, index)) for index in range(image.chunks))


class Slot:
    """One slot as one process sees it. Only one thread may use the slot at a time, with one exception: while a thread calls `reserve`,
    another thread may read headers.

    Raises MachineError if the agent that owned the memory has ended.
    """

    def __init__(self, path: str, turn: str = "") -> None:
        """turn: a file that each rank of the node locks while it checks for free memory and allocates it."""
        self._turn = turn or path
        try:
            self._fd = high(opened(path, os.O_RDWR))
        except OSError as error:
            raise MachineError(f"{path}: {error.strerror}. The agent that owned this memory has ended.") from error
        self._mapping = threading.Lock()
        """Lock for mapping the slot again. The lock prevents a thread that maps only the header page from replacing another thread's
        mapping of the whole slot."""
        self._map: memoryview | None = None
        self._words: memoryview | None = None
        self._memory: memoryview | None = None
        self._place = 0, 0
        self._offset = 0
        """Offset of the image in bytes, as `reserve` has returned it."""

    def header(self) -> Header:
        """Return the current header, read without a lock, which suffices for choosing a slot. `reading` reads the header again under a
        lock."""
        memory = self._mapped(HEADER_BYTES)
        if memory is None:
            return Header()
        for _ in range(_LOOKS):
            page = bytes(memory[:HEADER_BYTES])
            if page == memory[:HEADER_BYTES]:  # otherwise the writer is changing the fields right now
                header = Header.unpack(page)
                return header if not header.held or self._holds(header) else Header()
        return Header()

    def begin(self, wanted: Header, table: bytes) -> View | None:
        """Prepare the slot for the snapshot that `wanted` describes, and return its memory. `begin` itself sets the state and offsets of
        the slot's new header.

        Returns None, with the old content unchanged, while a reader locks the slot. Once `begin` has returned memory, the old content is
        lost. The memory keeps its address from one snapshot to the next unless it has to grow.

        Raises MachineError, with the old content unchanged, if there is not enough memory.
        """
        if not self._lock(fcntl.LOCK_EX):
            return None
        try:
            offset = self._room(wanted, len(table))
            memory = self._grow(offset + wanted.image.memory_bytes)
        except BaseException:
            self.release()
            raise
        self._store(STATE_OFFSET, State.STAGING)
        header = replace(wanted, state=State.STAGING, drained=False, table_bytes=len(table), image_offset=offset)
        memory[:HEADER_BYTES] = header.pack()
        memory[PAGE_BYTES : PAGE_BYTES + len(table)] = table
        return self._view(header, table)

    def reserve(self, wanted: Header, table_bytes: int) -> tuple[int, memoryview]:
        """Allocate the memory that `begin` will need for the snapshot that `wanted` describes. Return the image's offset and memory, whose
        pages need not be mapped yet. The content and the lock do not change. Raises MachineError as `begin` does."""
        self._offset = self._room(wanted, table_bytes)
        end = self._offset + wanted.image.memory_bytes
        return self._offset, self._grow(end, populate=False)[self._offset : end]

    def take(self, nbytes: int) -> None:
        """Grow the slot's memory to `nbytes`, including header and table. Raises MachineError as `begin` does."""
        self._grow(nbytes, populate=False)

    def staged(self) -> None:
        """Mark the view that `begin` returned as filled, so that readers may use it."""
        self._store(STATE_OFFSET, State.STAGED)
        self.release()

    def seal(self, *, live: bool = False) -> None:
        """Mark the step as staged by every rank of the job. live: only the ranks that are alive now can go back to this step."""
        self._store(STATE_OFFSET, State.LIVE if live else State.SEALED)

    def release(self) -> None:
        """Release only the lock. If the slot was begun, but neither staged nor sealed, it remains torn."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def free(self) -> None:
        """Mark the content as no longer needed. A process that is reading it may finish, and then sees state FREE in `header`."""
        if self._mapped(HEADER_BYTES) is not None:
            self._store(STATE_OFFSET, State.FREE)
            self.release()

    def want_durable(self) -> None:
        """Mark the content as needed on disk, though it was staged without that mark."""
        self._store(DURABLE_OFFSET, 1)

    def mark_drained(self) -> None:
        """Mark the content as committed on disk. Call `mark_drained` within `reading`: without that lock, the slot may contain another
        snapshot by now."""
        self._store(DRAINED_OFFSET, 1)

    @contextmanager
    def reading(self) -> Iterator[View | None]:
        """Yield the content, which does not change during the block. Yield None if the slot is empty, or while its writer locks it."""
        if not self._lock(fcntl.LOCK_SH):
            yield None
            return
        try:
            header = self.header()
            memory = self._mapped(header.end) if header.held else None
            if memory is None:
                yield None
            else:
                yield self._view(header, bytes(memory[PAGE_BYTES : PAGE_BYTES + header.table_bytes]))
        finally:
            self.release()

    def close(self) -> None:
        """Close the slot. If a view still uses the memory, the memory is unmapped when the last view is gone."""
        self.release()  # explicitly: the mapping would keep the file open and locked
        os.close(self._fd)
        self._map = self._words = self._memory = None

    def words(self) -> tuple[Header, bytes, NDArray[np.uint64]] | None:
        """Return header, table and fingerprints of a whole snapshot. Return None if there is none, or if a writer began to overwrite it
        meanwhile. This method takes no lock, so no rank ever waits for its slot because of it. Instead, this method reads the header twice:
        `begin` stores STAGING before it changes anything else. The image is not mapped."""
        header = Header.unpack(os.pread(self._fd, PAGE_BYTES, 0).ljust(PAGE_BYTES, b"\0"))
        if not header.whole or not self._holds(header):
            return None
        table = os.pread(self._fd, header.table_bytes, PAGE_BYTES)
        found = os.pread(self._fd, 8 * header.pieces, _fingerprints_at(header.table_bytes))
        again = Header.unpack(os.pread(self._fd, PAGE_BYTES, 0))
        same = again.whole and again.stamp == header.stamp and len(found) == 8 * header.pieces
        return (header, table, np.frombuffer(found, np.uint64)) if same else None

    def _holds(self, header: Header) -> bool:
        """Return whether everything that the header describes fits into the slot, in the right order and without overlap."""
        ends = image_offset(header.table_bytes, header.pieces), header.image_offset, header.end
        return (
            header.image_offset % PAGE_BYTES == 0 and [*ends] == sorted(ends) and ends[-1] <= os.fstat(self._fd).st_size
        )

    def _lock(self, how: int) -> bool:
        try:
            fcntl.flock(self._fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _mapped(self, size: int, populate: bool = True) -> memoryview | None:
        """Map at least the first `size` bytes: only the header page, or the whole slot. Return None if the slot is smaller."""
        with self._mapping:
            if self._map is None or len(self._map) < size:
                there = os.fstat(self._fd).st_size
                if there < max(size, PAGE_BYTES):
                    return None
                # All pages are mapped now: faults of single pages cost 0.5 to 2 s per GiB, this costs 0.06 s per GiB (measured).
                # A file whose growth failed midway is longer than its memory, and mapping all pages would allocate the rest.
                whole = size > PAGE_BYTES
                nbytes = min(there, max(size, allocated(self._fd))) if whole else PAGE_BYTES
                self._map = mapped(self._fd, nbytes, populate=populate and whole)
                self._words = self._map[:PAGE_BYTES].cast("q")
                self._memory = None
            return self._map

    def _room(self, wanted: Header, table_bytes: int) -> int:
        """Return the image's offset in bytes: the old offset, if the table fits before it."""
        offset = max(self.header().image_offset, self._offset)
        if offset >= image_offset(table_bytes, wanted.pieces):
            return offset
        # The table gets a quarter more than it needs, because its length varies by a few digits.
        return image_offset(table_bytes + table_bytes // 4, wanted.pieces)

    def _grow(self, size: int, populate: bool = True) -> memoryview:
        """Return the mapped memory, of at least `size` bytes. Raises MachineError if there is not enough memory."""
        size = pages(size)
        growth = size - allocated(self._fd)
        try:
            if growth > 0:
                self._allocate(size, growth)
            memory = self._mapped(size, populate)
        except OSError as error:
            if error.errno not in (errno.ENOMEM, errno.ENOSPC, errno.EFBIG):
                raise MachineError(f"the memory for a snapshot cannot grow: {error.strerror or error}") from error
            free = max(bytes_for_slot(growth), 0)
            raise MachineError(
                f"no memory for a snapshot: it needs {growth >> 20} MiB more, and {free >> 20} MiB are available. "
                "The slot keeps its old snapshot. Use fewer slots, or give the machine more memory."
            ) from error
        assert memory is not None
        return memory

    def _allocate(self, size: int, growth: int) -> None:
        # POSIX locks and those of `_lock` are independent. Without this lock, ranks that check at the same time would all find enough
        # memory.
        with os.fdopen(opened(self._turn, os.O_RDWR), "r+b", buffering=0) as turn:
            fcntl.lockf(turn, fcntl.LOCK_EX)
            if growth > bytes_for_slot(growth):
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            allocate(self._fd, size)  # if a page were missing later, the kernel would kill the process that uses it

    def _view(self, header: Header, table: bytes) -> View:
        """Return the view. `memory` is the same object as long as the image does not move, because callers cache what they derive from
        it."""
        assert self._map is not None
        place = header.image_offset, header.image.memory_bytes
        if self._memory is None or place != self._place:
            self._place = place
            self._memory = self._map[place[0] : place[0] + place[1]]
        fingerprints = np.frombuffer(self._map, np.uint64, header.pieces, _fingerprints_at(len(table)))
        return View(header=header, table=table, fingerprints=fingerprints, memory=self._memory)

    def _store(self, offset: int, value: int) -> None:
        assert self._words is not None, "a slot without content has no state to change"
        self._words[offset // 8] = value  # one aligned 8-byte store


def _fingerprints_at(table_bytes: int) -> int:
    return PAGE_BYTES + -(-table_bytes // 8) * 8


def image_offset(table_bytes: int, pieces: int) -> int:
    return pages(_fingerprints_at(table_bytes) + 8 * pieces)


def table_of(header: Header, data: bytes) -> Table:
    """Return the table of a slot's content. Raises SnapshotError for invalid data, and for a table that does not match the header."""
    table = Table.from_json(data)
    described, held = (table.payload_bytes, len(table.pieces)), (header.payload_bytes, header.pieces)
    if described != held:
        raise SnapshotError(
            f"rank {header.rank}'s slot holds {held} bytes and tensors, and its table is of another payload, {described}"
        )
    return table
