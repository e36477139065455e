"""The shard's image: every payload byte has one place, checksums and index fill the rest."""

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_resilient.checkpoint.format.shard_image import CHUNK_BYTES, PAGE_BYTES, STRIDE_BYTES, Image, padded

SIZES = st.integers(1, 3 * PAGE_BYTES) | st.integers(1, 10 * CHUNK_BYTES)


@settings(deadline=None)
@given(SIZES)
def test_padding_fills_whole_chunks_and_is_idempotent(nbytes):
    total = padded(nbytes)
    assert nbytes <= total < nbytes + max(PAGE_BYTES, CHUNK_BYTES if nbytes > CHUNK_BYTES else 0)
    assert padded(total) == total
    image = Image(total)
    assert image.chunks * image.chunk_bytes == total
    assert image.stride_bytes % PAGE_BYTES == 0, "every chunk starts on a page"
    assert image.memory_bytes == image.chunks * image.stride_bytes
    assert image.file_bytes(image.chunks) == image.memory_bytes + len(image.index(range(image.chunks)))
    assert image.file_bytes(0) == 0


def test_four_mebibytes_hold_a_chunk_and_its_checksum():
    assert Image(padded(CHUNK_BYTES + 1)).stride_bytes == STRIDE_BYTES == 4 << 20


@settings(deadline=None)
@given(SIZES, st.data())
def test_segments_are_the_bytes_in_order(nbytes, data):
    image = Image(padded(nbytes))
    offset = data.draw(st.integers(0, image.payload_bytes))
    length = data.draw(st.integers(0, image.payload_bytes - offset))
    at = offset
    for chunk, place, run in image.segments(offset, length):
        assert chunk * image.chunk_bytes + place == at
        assert run > 0
        assert place + run <= image.chunk_bytes
        at += run
    assert at == offset + length


@settings(deadline=None)
@given(SIZES, st.sampled_from([8, 64, 4096]), st.data())
def test_aligned_returns_the_next_aligned_place(nbytes, align, data):
    image = Image(padded(nbytes))
    offset = data.draw(st.integers(0, image.payload_bytes))

    def place(of: int) -> int:
        chunk, at = divmod(of, image.chunk_bytes)
        return chunk * image.stride_bytes + at

    found = image.aligned(offset, align)
    assert place(found) % align == 0
    assert offset <= found
    assert not any(place(between) % align == 0 for between in range(offset, found))


@pytest.mark.parametrize("nbytes", [1, 5000, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_sealing_changes_only_the_bytes_between_the_chunks(nbytes):
    image = Image(padded(nbytes))
    memory = memoryview(bytearray(b"\x07" * image.memory_bytes))
    crcs = [crc for index in range(image.chunks) for crc in image.seal(memory, [index])]
    for index, crc in enumerate(crcs):
        chunk = image.chunk(memory, index)
        assert bytes(chunk) == b"\x07" * image.chunk_bytes
        assert crc == crc32c(chunk)
        assert bytes(image.sealed(memory, index)) == bytes(chunk) + crc.to_bytes(4, "little")


def test_an_index_names_the_written_chunks():
    image = Image(padded(5 * CHUNK_BYTES))
    pairs = np.frombuffer(image.index([1, 3])[:-4], "<u8").reshape(5, 2)
    absent = [2**64 - 1] * 2
    assert pairs.tolist() == [absent, [0, STRIDE_BYTES], absent, [STRIDE_BYTES, STRIDE_BYTES], absent]
    assert len(image.index([0], room=2)) == 2 * 16 + 4
