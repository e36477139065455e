"""Fingerprints: the same for the same bytes, however they are taken; another one for every flipped bit."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_resilient.checkpoint.format import fingerprint


def naive(content: bytes) -> int:
    words = content + bytes(-len(content) % 8)
    found = 0
    for at in range(0, len(words), 8):
        found ^= int.from_bytes(words[at : at + 8], "little")
    return found


def on_device(flat: torch.Tensor) -> int:
    return int(fingerprint.on_device(flat)) & (1 << 64) - 1


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(0, 8))
def test_bytes_and_tensors_have_the_fingerprint_of_the_definition(content, start):
    held = torch.frombuffer(bytearray(b"\xff" * 8 + content), dtype=torch.uint8)[8 - min(start, 8) :]
    flat, expected = held[min(start, 8) :], naive(content)
    assert fingerprint.of_bytes(memoryview(content)) == expected
    assert on_device(flat) == expected
    assert fingerprint.gather([fingerprint.on_device(flat)]).tolist() == [expected]


@pytest.mark.parametrize("words", [1, 2, 3, 1000, (1 << 20) - 1, 1 << 20, (1 << 21) + 12345])
def test_an_older_torch_computes_the_same_fingerprint(words, monkeypatch):
    flat = torch.randint(0, 256, (8 * words + 3,), dtype=torch.uint8)
    expected = on_device(flat)
    monkeypatch.delattr(torch, "hash_tensor")
    assert on_device(flat) == expected == fingerprint.of_bytes(flat.numpy().data)


@given(st.binary(min_size=1, max_size=64), st.data())
def test_every_flipped_bit_changes_the_fingerprint(content, data):
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    flipped = bytearray(content)
    flipped[bit // 8] ^= 1 << bit % 8
    assert fingerprint.of_bytes(memoryview(flipped)) != fingerprint.of_bytes(memoryview(content))


@given(st.binary(max_size=100), st.lists(st.integers(0, 100), max_size=5))
def test_the_parts_fingerprints_in_any_order_combine_to_the_whole(content, cuts):
    edges = [0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]
    found = 0
    for start, end in reversed(list(pairwise(edges))):
        found ^= fingerprint.of_part(memoryview(content)[start:end], start)
    assert found == naive(content)
