"""The limits of a snapshot's speed: move a state's bytes, without any format, to a file and back, and over a device's link and back.

The bytes are in page-aligned host memory beforehand, pinned if there is a device. This module does not measure time.
"""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from states import MIB, State, as_bytes, nbytes

from mt_resilient.training import device

PAGE = mmap.PAGESIZE
WRITE, READ, READERS = 16 * MIB, 4 * MIB, 4
"""The bytes of one write request and of one read request, and the number of concurrent reads. On a virtual disk, more writers do not write
faster (measured), and more readers do not read faster. A memory file system accepts one `write` to a file at a time."""


class Limits:
    def __init__(self, state: State, kind: str) -> None:
        """kind: the type of the state's device."""
        self._kind, self._nbytes = kind, nbytes(state)
        self._image = memoryview(mmap.mmap(-1, -(-self._nbytes // PAGE) * PAGE))
        ring = mmap.mmap(-1, READERS * READ, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # the kernel has no huge pages
            ring.madvise(mmap.MADV_HUGEPAGE)
        ring[:] = bytes(len(ring))  # so that reading does not include the first touch of a page
        self._ring = [memoryview(ring)[at : at + READ] for at in range(0, len(ring), READ)]
        self.down(state)
        if kind != "cpu" and not device.register(kind, self._image):
            raise RuntimeError(f"{kind} does not pin memory here")

    def write(self, file: Path, flags: int) -> None:
        """Write with one thread, then fsync the file and its directory. flags: O_DIRECT, or 0 for the page cache."""
        _write(file, flags, self._image, self._nbytes)
        _sync(file.parent)

    def write_files(self, directory: Path, files: int) -> None:
        """Write through the page cache, in this many equal parts, each with its own new file and thread."""
        part = -(-self._nbytes // files // PAGE) * PAGE
        parts = [self._image[at : at + part] for at in range(0, len(self._image), part)]
        directory.mkdir()
        with ThreadPoolExecutor(files) as threads:
            list(threads.map(lambda n: _write(directory / str(n), 0, parts[n], len(parts[n])), range(len(parts))))
        _sync(directory)

    def read(self, file: Path, flags: int) -> None:
        """Read into a few buffers, which are used again and again."""
        descriptor = os.open(file, os.O_RDONLY | flags)
        size = os.fstat(descriptor).st_size

        def read(first: int) -> int:
            offsets = range(first * READ, size, READERS * READ)
            return sum(os.preadv(descriptor, [self._ring[first]], offset) for offset in offsets)

        try:
            with ThreadPoolExecutor(READERS) as threads:
                if sum(threads.map(read, range(READERS))) != size:
                    raise OSError(f"{file}: a read came back short")
        finally:
            os.close(descriptor)

    def down(self, state: State) -> None:
        """Copy from device to host. The copy is complete on return."""
        for host, tensor in self._pairs(state):
            host.copy_(tensor, non_blocking=True)
        device.synchronize(state.values())

    def up(self, state: State) -> None:
        """Copy from host to device. The copy is complete on return."""
        for host, tensor in self._pairs(state):
            tensor.copy_(host, non_blocking=True)
        device.synchronize(state.values())

    def _pairs(self, state: State) -> list[tuple[torch.Tensor, torch.Tensor]]:
        image, offset, pairs = torch.frombuffer(self._image, dtype=torch.uint8), 0, []
        for tensor in state.values():
            pairs.append((image[offset : offset + tensor.nbytes], as_bytes(tensor)))
            offset += tensor.nbytes
        return pairs


def _write(file: Path, flags: int, data: memoryview, nbytes: int) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags)
    try:
        offset = 0
        while offset < len(data):
            offset += os.pwrite(descriptor, data[offset : offset + WRITE], offset)
        os.ftruncate(descriptor, nbytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
