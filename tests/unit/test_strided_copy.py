"""Where a tensor's bytes lie in a slot's image, as rows that one call copies."""

from hypothesis import given
from hypothesis import strategies as st

from mt_resilient.checkpoint.format.shard_image import CHUNK_BYTES, STRIDE_BYTES, Image, padded
from mt_resilient.training.snapshot.strided_copy import Strip, strips

WITHIN = 4 * STRIDE_BYTES


def rows(found: list[Strip], stride: int) -> list[tuple[int, int, int]]:
    """(place, at, bytes) of each row."""
    return [
        (each.place + row * stride, each.at + row * each.width, each.width)
        for each in found
        for row in range(each.rows)
    ]


@given(st.integers(0, 12 * CHUNK_BYTES), st.integers(0, 12 * CHUNK_BYTES))
def test_all_bytes_once_in_order_and_no_strip_in_two_pieces(offset: int, nbytes: int) -> None:
    image = Image(padded(offset + nbytes + CHUNK_BYTES))
    found = strips(image, offset, nbytes, WITHIN)
    done = 0
    expected = []
    for chunk, at, run in image.segments(offset, nbytes):
        expected.append((chunk * image.stride_bytes + at, done, run))
        done += run
    assert rows(found, image.stride_bytes) == expected
    assert all(each.place // WITHIN == (each.end(image.stride_bytes) - 1) // WITHIN for each in found)


def test_whole_chunks_are_one_strip_and_the_edges_one_each() -> None:
    image = Image(padded(8 * CHUNK_BYTES))
    found = strips(image, CHUNK_BYTES - 64, 3 * CHUNK_BYTES + 128, 8 * STRIDE_BYTES)
    assert [(each.width, each.rows) for each in found] == [(64, 1), (CHUNK_BYTES, 3), (64, 1)]


def test_a_payload_of_less_than_a_chunk_is_one_row() -> None:
    image = Image(padded(1000))
    assert strips(image, 64, 500, WITHIN) == [Strip(64, 0, 500, 1)]
    assert strips(image, 64, 0, WITHIN) == []
