"""Tables of pieces: laid out without overlap, read back only when every number fits; and tensors through them, bit by
bit."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_resilient.checkpoint.arena import staging
from mt_resilient.checkpoint.arena.arena import View
from mt_resilient.checkpoint.arena.fill import destinations, fill
from mt_resilient.checkpoint.arena.slot_header import Header
from mt_resilient.checkpoint.format import pytree, tensor_table
from mt_resilient.checkpoint.format.shard_image import CHUNK_BYTES
from mt_resilient.checkpoint.format.tensor_table import ITEM_BYTES, Table, plan
from mt_resilient.resilience.errors import SnapshotError

shapes = st.lists(st.integers(0, 50), max_size=3).map(tuple)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), shapes), max_size=20))
def test_pieces_are_aligned_do_not_overlap_and_are_parsed_as_written(rows):
    table = plan({"x": 1}, [(f"t{index}", dtype, shape) for index, (dtype, shape) in enumerate(rows)])
    assert Table.from_json(table.to_json()) == table
    end = 0
    for piece in table.pieces:
        assert table.image.aligned(piece.offset, 64) == piece.offset
        assert piece.offset >= end
        end = piece.offset + piece.nbytes
    assert end <= table.payload_bytes
    assert table.payload_bytes % table.image.chunk_bytes == 0


GOOD = plan({"leaf": "a"}, [("a", "float32", (4, 4)), ("b", "bfloat16", (3,))]).as_object()


def changed(**fields):
    return {**GOOD, **fields}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([], "got `array`"),
        (changed(extra=1), "unknown field"),
        (changed(payload_bytes=True), "got `bool`"),
        (changed(payload_bytes=4097), "whole number of chunks"),
        (changed(payload_bytes=0), ">= 1"),
        (changed(pieces=[["a", "float32", [4, 4], 0], ["a", "uint8", [1], 64]]), "twice"),
        (changed(pieces=[["a", "float32", [4, 4], 0], ["b", "uint8", [1], 0]]), "over another"),
        (changed(pieces=[["a", "float32", [4, 4], 32]]), "unaligned"),
        (changed(pieces=[["a", "float32", [4, 4], 4096]]), "outside"),
        (changed(pieces=[["a", "float32", [1 << 40, 1 << 40], 0]]), "malformed row"),
        (changed(pieces=[["a", "object", [1], 0]]), "malformed row"),
        (changed(pieces=[["a", "float32", [-1], 0]]), ">= 0"),
        (changed(pieces=[["a", "float32", [True], 0]]), "got `bool`"),
        (changed(pieces=[["a", "float32", 3, 0]]), "got `int`"),
        (changed(pieces=[{"name": "a"}]), "got `object`"),
    ],
)
def test_a_malformed_table_is_refused(found, words):
    with pytest.raises(SnapshotError, match=words):
        Table.from_json(json.dumps(found).encode())


@settings(deadline=None)
@given(st.binary() | st.integers(0, 10**6).map(lambda at: flipped(at)))
def test_random_or_damaged_bytes_are_a_table_or_refused(data):
    try:
        table = Table.from_json(data)
    except SnapshotError:
        return
    assert all(piece.offset + piece.nbytes <= table.payload_bytes for piece in table.pieces)


def flipped(at: int) -> bytes:
    data = bytearray(json.dumps(GOOD).encode())
    data[at % len(data)] ^= 1 << (at // len(data) % 8)
    return bytes(data)


def test_json_that_is_nested_too_deep_is_refused():
    with pytest.raises(SnapshotError, match="damaged"):
        Table.from_json(b"[" * 200_000)


# Tensors


def every_kind() -> dict[str, torch.Tensor]:
    raw = torch.randint(0, 256, (24, 16), dtype=torch.uint8)
    state = {dtype: raw.clone().view(getattr(torch, dtype)) for dtype in ITEM_BYTES if dtype != "bool"}
    state |= {
        "bool": raw > 7,
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7),
        "weight": torch.ones(3, requires_grad=True),
    }
    state |= {f"{name}-strided": tensor.t()[::2] for name, tensor in list(state.items()) if tensor.dim() == 2}
    state |= {"one of many": torch.rand(3, 5)[1:2, 0], "imaginary": torch.randn(1, dtype=torch.complex64).conj().imag}
    return {**state, "conj": torch.randn(3, dtype=torch.complex64).conj(), "expanded": torch.ones(1).expand(5)}


def bits(tensor: torch.Tensor) -> list[int]:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()).reshape(-1).view(torch.uint8).tolist()


class Slot:
    """Memory as a slot gives it."""

    def __init__(self, table: Table, garbage: bytes = b"\xaa") -> None:
        self.table = table
        self.memory = memoryview(bytearray(garbage * table.image.memory_bytes))
        self.fingerprints = np.zeros(len(table.pieces), np.uint64)
        header = Header(pieces=len(table.pieces), payload_bytes=table.payload_bytes)
        self.view = View(header=header, table=b"", fingerprints=self.fingerprints, memory=self.memory)

    def stage(self, leaves, stager=None):
        (stager or staging.Stager()).stage(leaves, self.table, self.view)
        return self

    def payload(self) -> bytes:
        return b"".join(bytes(chunk) for _, chunk in self.chunks())

    def chunks(self):
        return self.view.chunks()

    def back(self, live=()):
        leaves = destinations(self.table, dict(live))
        fill(self.table, leaves, self.chunks(), self.fingerprints)
        return leaves


def test_every_dtype_and_stride_is_staged_and_filled_exact_to_the_bit():
    state = every_kind() | {"rng": np.arange(7, dtype=np.uint32)[::-1], "lr": 0.1}
    stager = staging.Stager()
    planned, encoded, leaves = stager.plan(state, torch.is_tensor)
    table = Table.from_json(encoded)
    assert table == Table.of(planned, encoded) == Table.from_json(table.to_json())
    slot = Slot(table).stage(leaves, stager)
    back = pytree.unflatten(table.skeleton, slot.back())
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor):
            assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape)
            assert bits(back[name]) == bits(tensor), name
    assert back["rng"].dtype == np.uint32
    assert back["rng"].tolist() == state["rng"].tolist()
    other = Slot(table, b"\x55").stage(leaves, stager)
    assert other.payload() == slot.payload(), "bytes depend on nothing but the state"


def test_a_stager_follows_a_change_of_layout():
    stager = staging.Stager()
    for shape in ((4,), (2, 2), (100,), (100,), (4,)):
        layout, _, leaves = stager.plan({"x": torch.rand(shape)}, torch.is_tensor)
        slot = Slot(layout).stage(leaves, stager)
        assert torch.equal(slot.back()["x"], leaves[0])
        assert not any(slot.payload()[slot.table.pieces[0].nbytes :])


def test_tensors_that_cross_chunks_fill_live_tensors_in_place():
    big = {
        "a": torch.randn(CHUNK_BYTES // 4 - 5),
        "b": torch.randint(0, 99, (CHUNK_BYTES // 4 + 3,)),
        "c": torch.ones(7),
    }
    slot = Slot(staging.lay_out(list(big.items()))).stage(list(big.values()))
    live = {"a": torch.zeros_like(big["a"]), "b": torch.zeros(3), "c": torch.zeros(14)[::2]}
    back = slot.back(live)
    assert all(torch.equal(back[name], big[name]) for name in big)
    assert back["a"].data_ptr() == live["a"].data_ptr()
    assert not live["b"].any(), "another shape is another tensor"
    assert not live["c"].any(), "one that is not contiguous is put in place by its owner"


def test_one_element_of_a_matrix_is_filled_where_it_lies():
    whole, live = torch.rand(3, 5), torch.zeros(3, 5)
    slot = Slot(staging.lay_out([("x", whole[1:2, 2])])).stage([whole[1:2, 2]])
    slot.back({"x": live[1:2, 2]})
    assert live[1, 2] == whole[1, 2]
    assert live.count_nonzero() == 1


def test_tensors_can_be_resized_after_they_were_staged_or_filled():
    """As the observers of torch.ao.quantization do in their first pass."""
    kept, live = {"x": torch.ones(3), "none": torch.ones(0)}, {"x": torch.zeros(3), "none": torch.ones(0)}
    slot = Slot(staging.lay_out(list(kept.items()))).stage(list(kept.values()))
    slot.back(live)
    assert live["x"].tolist() == [1, 1, 1]
    for each in (*kept.values(), *live.values()):
        assert each.resize_(6).shape == (6,)


@pytest.mark.parametrize("at", [0, CHUNK_BYTES - 1, CHUNK_BYTES + 4, CHUNK_BYTES + 2000])
def test_a_tensor_with_a_changed_bit_is_named(at):
    leaves = [("a", torch.randn(CHUNK_BYTES // 4)), ("b", torch.randn(600))]
    slot = Slot(staging.lay_out(leaves)).stage([leaf for _, leaf in leaves])
    slot.memory[at] ^= 4
    with pytest.raises(SnapshotError, match=f"tensor '{'a' if at < CHUNK_BYTES else 'b'}' arrived with"):
        slot.back()


def test_tensors_without_plain_bytes_are_refused_by_name():
    with pytest.raises(SnapshotError, match=r"'s', a torch\.Tensor, can't be saved: it is not dense"):
        staging.lay_out([("s", torch.eye(3).to_sparse())])
    with pytest.raises(SnapshotError, match=r"'q', .*it is torch\.qint8, quantized"):
        staging.lay_out([("q", torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.qint8))])


def test_the_same_layout_is_planned_without_a_device():
    leaves = [("x", torch.empty(10, device="meta"))]
    assert staging.lay_out(leaves) == tensor_table.lay_out([("x", "float32", (10,))])
