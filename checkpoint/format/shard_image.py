"""Maps each byte of a payload (a rank's tensors, one after another) to its place in the shard file. Pure.

A shard of zarr v3 (`sharding_indexed`, packed) is `[chunk | crc32c] × n | index | crc32c of the index`. A slot has the same layout, without
the index. So a staged slot is written to disk without first being copied into another layout. A chunk and its checksum together fill 4 MiB.
Every chunk starts on a page, which is best for direct I/O and devices. The file does not contain chunks that another rank writes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from crc32c import crc32c

PAGE_BYTES = 4096
CRC_BYTES = 4
_CRC = struct.Struct("<I")
STRIDE_BYTES = 4 << 20
CHUNK_BYTES = STRIDE_BYTES - CRC_BYTES
"""Bytes per chunk, the unit of checksums and of reading. Larger chunks are not faster."""


@dataclass(frozen=True)
class Image:
    """The image of a payload of `payload_bytes`, a size that `padded` returned: several whole chunks, or one smaller chunk."""

    payload_bytes: int

    @cached_property
    def chunk_bytes(self) -> int:
        return min(CHUNK_BYTES, self.payload_bytes)

    @cached_property
    def stride_bytes(self) -> int:
        """Bytes from the start of one chunk to the start of the next, including the checksum: a multiple of the page size."""
        return self.chunk_bytes + CRC_BYTES

    @property
    def chunks(self) -> int:
        return self.payload_bytes // self.chunk_bytes

    @property
    def memory_bytes(self) -> int:
        return self.chunks * self.stride_bytes

    def file_bytes(self, written: int) -> int:
        """Return the size in bytes of a shard that contains `written` chunks. Return 0 for 0 chunks, because then there is no file."""
        return written * self.stride_bytes + 16 * self.chunks + CRC_BYTES if written else 0

    def index(self, written: Sequence[int], room: int = 0) -> bytes:
        """Return the bytes that follow the chunks `written`: an (offset, size) pair for each chunk, and the checksum of all pairs. The pair
        of a missing chunk is all ones. room: the number of pairs; 0: one for each chunk of the image."""
        pairs = np.full((room or self.chunks, 2), ~np.uint64(0), "<u8")
        pairs[written, 0] = np.arange(len(written)) * self.stride_bytes
        pairs[written, 1] = self.stride_bytes
        body = pairs.tobytes()
        return body + _CRC.pack(crc32c(body))

    def segments(self, offset: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield where the payload bytes [offset, offset + nbytes) are, as contiguous runs: (chunk, offset in the chunk, bytes)."""
        size = self.chunk_bytes
        while nbytes > 0:
            chunk, at = divmod(offset, size)
            run = min(nbytes, size - at)
            yield chunk, at, run
            offset, nbytes = offset + run, nbytes - run

    def aligned(self, offset: int, align: int) -> int:
        """Return the first payload offset, at or after `offset`, whose place in the image is a multiple of `align`. A page must be a
        multiple of `align`."""
        chunk, at = divmod(offset, self.chunk_bytes)
        at = -(-at // align) * align
        # After the last multiple of `align` in a chunk comes the next chunk's start: the checksum fills the bytes between them.
        return chunk * self.chunk_bytes + min(at, self.chunk_bytes)

    def chunk(self, memory: memoryview, index: int) -> memoryview:
        """Return the payload bytes of one chunk, in memory laid out as this image."""
        at = index * self.stride_bytes
        return memory[at : at + self.chunk_bytes]

    def sealed(self, memory: memoryview, index: int) -> memoryview:
        """Return the chunk followed by its checksum."""
        return memory[index * self.stride_bytes : (index + 1) * self.stride_bytes]

    def seal(self, memory: memoryview, chunks: Sequence[int]) -> list[int]:
        """Write the checksum of each of `chunks` behind the chunk, and return the checksums."""
        crcs = [crc32c(self.chunk(memory, index)) for index in chunks]
        for index, crc in zip(chunks, crcs, strict=True):
            _CRC.pack_into(memory, index * self.stride_bytes + self.chunk_bytes, crc)
        return crcs


def padded(nbytes: int) -> int:
    """Return `nbytes` rounded up to whole chunks. If one chunk suffices, its size and its checksum together fill whole pages."""
    if nbytes <= CHUNK_BYTES:
        return pages(nbytes + CRC_BYTES) - CRC_BYTES
    return -(-nbytes // CHUNK_BYTES) * CHUNK_BYTES


def pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
