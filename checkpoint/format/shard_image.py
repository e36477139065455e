"""Where each byte of a payload lies in its shard file. Pure.

A shard of zarr v3 (`sharding_indexed`, packed) is `[chunk | crc32c] × n | index | crc32c of the index`. A slot is laid out as this very
image but for the index, so that nothing is copied between staging and the disk: a chunk and its checksum together fill 4 MiB, and every
chunk starts on a page, as direct I/O and devices like it. Chunks that another rank writes are left out of the file.
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
"""Unit of checksums and of reading (facts: larger ones do not get faster)."""


@dataclass(frozen=True)
class Image:
    """The image of a payload of `payload_bytes`, which `padded` gave: whole chunks, or one smaller one."""

    payload_bytes: int

    @cached_property
    def chunk_bytes(self) -> int:
        return min(CHUNK_BYTES, self.payload_bytes)

    @cached_property
    def stride_bytes(self) -> int:
        """From one chunk to the next, its checksum included: whole pages."""
        return self.chunk_bytes + CRC_BYTES

    @property
    def chunks(self) -> int:
        return self.payload_bytes // self.chunk_bytes

    @property
    def memory_bytes(self) -> int:
        return self.chunks * self.stride_bytes

    def file_bytes(self, written: int) -> int:
        """Of the shard that has so many of the chunks; without any there is none."""
        return written * self.stride_bytes + 16 * self.chunks + CRC_BYTES if written else 0

    def index(self, written: Sequence[int], room: int = 0) -> bytes:
        """What follows the chunks `written`: an (offset, size) pair for each chunk that there is room for (without: all of the image's),
        all ones for those that are not there; and their checksum."""
        pairs = np.full((room or self.chunks, 2), ~np.uint64(0), "<u8")
        pairs[written, 0] = np.arange(len(written)) * self.stride_bytes
        pairs[written, 1] = self.stride_bytes
        body = pairs.tobytes()
        return body + _CRC.pack(crc32c(body))

    def segments(self, offset: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """The runs of payload bytes [offset, offset + nbytes): (chunk, place in the chunk, bytes), in order."""
        size = self.chunk_bytes
        while nbytes > 0:
            chunk, at = divmod(offset, size)
            run = min(nbytes, size - at)
            yield chunk, at, run
            offset, nbytes = offset + run, nbytes - run

    def aligned(self, offset: int, align: int) -> int:
        """The first payload offset from `offset` on whose place in the image is a multiple of `align`, which divides a page."""
        chunk, at = divmod(offset, self.chunk_bytes)
        at = -(-at // align) * align
        # Past the last multiple of `align` in a chunk is the next chunk's start: the checksum fills up what is between them.
        return chunk * self.chunk_bytes + min(at, self.chunk_bytes)

    def chunk(self, memory: memoryview, index: int) -> memoryview:
        """The payload of one chunk, in memory that is laid out as the image."""
        at = index * self.stride_bytes
        return memory[at : at + self.chunk_bytes]

    def sealed(self, memory: memoryview, index: int) -> memoryview:
        """The chunk and the checksum behind it."""
        return memory[index * self.stride_bytes : (index + 1) * self.stride_bytes]

    def seal(self, memory: memoryview, chunks: Sequence[int]) -> list[int]:
        """Put the checksums of `chunks` behind them; gives them."""
        crcs = [crc32c(self.chunk(memory, index)) for index in chunks]
        for index, crc in zip(chunks, crcs, strict=True):
            _CRC.pack_into(memory, index * self.stride_bytes + self.chunk_bytes, crc)
        return crcs


def padded(nbytes: int) -> int:
    """`nbytes` rounded up to whole chunks; up to one chunk, to what fills whole pages together with its checksum."""
    if nbytes <= CHUNK_BYTES:
        return pages(nbytes + CRC_BYTES) - CRC_BYTES
    return -(-nbytes // CHUNK_BYTES) * CHUNK_BYTES


def pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
