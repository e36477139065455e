"""From any layout to any other: every element arrives, from chunks that hold it and no others, or a sentence says why not."""

import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from mt_resilient.checkpoint.arena import arena
from mt_resilient.checkpoint.arena.arena import RankArena, Slot
from mt_resilient.checkpoint.arena.slot_header import Header, Stamp
from mt_resilient.checkpoint.arena.staging import Stager
from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.checkpoint.backend.paths import Attempt
from mt_resilient.checkpoint.durable import load, load_resharded
from mt_resilient.checkpoint.durable.load_resharded import Saved, Wanted, word
from mt_resilient.checkpoint.durable.save import drain
from mt_resilient.checkpoint.format.shard_image import CHUNK_BYTES
from mt_resilient.checkpoint.format.sharding import Part, boxes, row_major
from mt_resilient.checkpoint.format.tensor_table import Table
from mt_resilient.checkpoint.slabs.slab_writer import writer
from mt_resilient.resilience.errors import LayoutError, SnapshotError
from mt_resilient.training.state.tensors.in_place import Nested

Held = list[tuple[str, torch.Tensor, list[Part]]]
"""Of one rank: leaf, tensor, its places."""


def save(root: Path, ranks: Sequence[Held]) -> Files:
    return save_states(
        root,
        [({name: tensor for name, tensor, _ in held}, {name: parts for name, _, parts in held}) for held in ranks],
    )


def save_states(root: Path, ranks: Sequence[tuple[Nested, dict[str, list[Part]]]]) -> Files:
    """ranks: of each its state, and the places of its leaves."""
    fds = arena.create(len(ranks), 1)
    slots = [[Slot(path) for path in row] for row in arena.paths(fds, os.getpid())]
    for rank, (state, places) in enumerate(ranks):
        stager = Stager()
        table, encoded, leaves = stager.plan(state, torch.is_tensor, lambda p=places: p)
        assert Table.from_json(encoded) == Table.of(table, encoded)
        wanted = Header(
            generation=1,
            step=1,
            rank=rank,
            world=len(ranks),
            durable=True,
            pieces=len(table.pieces),
            payload_bytes=table.payload_bytes,
        )
        claimed = RankArena([f"/proc/self/fd/{fds[rank][0]}"]).claim(wanted, encoded)
        assert claimed is not None
        slot, view = claimed
        stager.stage(leaves, table, view)
        slot.staged()
        slot.seal()
    report = drain(slots, Attempt(run="5eed5eed", stamp=Stamp(1, 0, 1)), Files(root), 0, writer(Files(root)))
    assert report is not None
    for slot in itertools.chain(*slots):
        slot.close()
    for fd in itertools.chain(*fds):
        os.close(fd)
    return report.snapshot


def whole(name: str, tensor: torch.Tensor) -> list[Part]:
    shape = tuple(tensor.shape)
    return [Part(name=name, shape=shape, offset=(0,) * len(shape), box=shape)]


# Random layouts


@st.composite
def splits(draw: st.DrawFn, shape: tuple[int, ...]) -> list[list[Part]]:
    """Per rank, the parts of a global tensor "t": a grid of boxes; each held whole, or cut in flat shards, or by several replicas."""
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) if size else [0, 0] for size in shape]
    grid = itertools.product(*(list(itertools.pairwise(each)) for each in cuts))
    ranks: list[list[Part]] = []
    for cell in grid:
        offset = tuple(begin for begin, _ in cell)
        box = tuple(end - begin for begin, end in cell)
        part = Part(name="t", shape=shape, offset=offset, box=box)
        elements = math.prod(box)
        kind = draw(st.sampled_from(["whole", "flat", "replicas"]))
        if kind == "flat" and elements:
            at = sorted({0, elements, *draw(st.lists(st.integers(0, elements), max_size=2))})
            ranks += [[replace(part, flat=run)] for run in itertools.pairwise(at)]
        elif kind == "replicas":
            ranks += [[replace(part, replica=(copy, 0))] for copy in range(2)]
        else:
            ranks.append([part])
    return ranks


def held(values: torch.Tensor, parts: Sequence[Part]) -> torch.Tensor:
    """What a rank with `parts`, each row-major from its `start` on, has of `values`."""
    found = []
    for part in parts:
        region = values[tuple(slice(o, o + n) for o, n in zip(part.offset, part.box, strict=True))].reshape(-1)
        found.append(region if part.flat is None else region[slice(*part.flat)])
    return torch.cat(found)


shapes = st.lists(st.integers(1, 7), max_size=3).map(tuple)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), shapes, st.sampled_from(["float32", "bfloat16", "float8_e4m3fn", "complex128", "bool"]))
def test_any_layout_comes_out_of_any_other(tmp_path_factory, data, shape, dtype):
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (*shape, word(dtype).itemsize), dtype=torch.uint8)
    values = raw.view(getattr(torch, dtype)).reshape(shape)
    before, after = data.draw(splits(shape)), data.draw(splits(shape))
    ranks = [[("t", held(values, parts), parts)] for parts in before]
    saved = Saved(save(tmp_path_factory.mktemp("reshard"), ranks))
    for parts in after:
        expected = held(values, parts)
        memory = np.zeros(expected.numel(), word(dtype))
        saved.fill([Wanted("t", dtype, parts, memory)])
        assert memory.tobytes() == expected.contiguous().view(torch.uint8).numpy().tobytes()
    assert saved.whole("t").tobytes() == values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_strided_parts_are_put_where_they_lie(tmp_path):
    values = torch.arange(2 * 3 * 5, dtype=torch.int32).view(2, 3, 5)
    transposed = values.transpose(0, 2).contiguous()  # (5, 3, 2)
    strides = (1, 2, 6)
    part = Part(name="t", shape=(2, 3, 5), offset=(0, 0, 0), box=(2, 3, 5), strides=strides)
    saved = Saved(save(tmp_path, [[("live", transposed, [part])]]))
    assert saved.whole("t").tolist() == values.reshape(-1).tolist()
    memory = np.zeros(30, word("int32"))
    saved.fill([Wanted("live", "int32", [part], memory)])
    assert memory.tolist() == transposed.reshape(-1).tolist()


# Only what is needed


def test_only_the_chunks_that_hold_something_wanted_are_read(tmp_path, monkeypatch):
    rows = 6 * CHUNK_BYTES // 4096
    values = torch.arange(rows * 1024, dtype=torch.int32).view(rows, 1024)
    saved = Saved(save(tmp_path, [[("t", values, whole("t", values))]]))
    read: list[int] = []
    original = load.chunks

    def counted(snapshot, manifest, wanted=None):
        read.extend(wanted)
        return original(snapshot, manifest, wanted)

    monkeypatch.setattr(load_resharded.load, "chunks", counted)
    for first, count in ((0, 10), (rows // 2, 3), (rows - 1, 1)):
        read.clear()
        part = Part(name="t", shape=(rows, 1024), offset=(first, 0), box=(count, 1024))
        memory = np.zeros(count * 1024, word("int32"))
        saved.fill([Wanted("t", "int32", [part], memory)])
        assert memory.tolist() == values[first : first + count].reshape(-1).tolist()
        assert read == sorted({first * 4096 // CHUNK_BYTES, ((first + count) * 4096 - 1) // CHUNK_BYTES})


# What cannot be


def test_what_is_not_in_it_is_said_before_anything_is_read(tmp_path):
    values = torch.arange(12.0).view(3, 4)
    half = [Part(name="t", shape=(3, 4), offset=(0, 0), box=(2, 4))]
    saved = Saved(save(tmp_path, [[("t", values[:2].contiguous(), half)]]))

    def fill(**more):
        part = Part(**{"name": "t", "shape": (3, 4), "offset": (0, 0), "box": (3, 4)} | more)
        saved.fill([Wanted("live t", more.pop("dtype", "float32"), [part], np.zeros(12, word("float32")))])

    with pytest.raises(LayoutError, match="the snapshot holds 8 of the 12 elements"):
        fill()
    with pytest.raises(LayoutError, match="holds 0 of"):
        fill(name="other")
    with pytest.raises(LayoutError, match=r"as float32 \(3, 4\), and this run wants float32 \(3, 5\)"):
        fill(shape=(3, 5))


def test_rows_of_padding_that_only_one_layout_has_are_zero(tmp_path):
    values = torch.arange(1.0, 13.0).view(3, 4)
    part = Part(name="t", shape=(3, 4), offset=(0, 0), box=(3, 4), padded=True)
    saved = Saved(save(tmp_path, [[("t", values, [part])]]))
    wider = Part(name="t", shape=(5, 4), offset=(0, 0), box=(5, 4), padded=True)
    memory = np.full(20, 7, word("float32"))
    saved.fill([Wanted("t", "float32", [wider], memory)])
    assert memory.view(np.float32).tolist() == [*values.reshape(-1).tolist(), *[0.0] * 8]


def test_a_flipped_bit_is_found_on_this_way_too(tmp_path):
    values = torch.arange(1000.0)
    snapshot = save(tmp_path, [[("t", values, whole("t", values))]])
    shard = next(snapshot.path.glob("rank-00000/c/0/0"))
    content = bytearray(shard.read_bytes())
    content[123] ^= 1
    shard.write_bytes(content)
    with pytest.raises(SnapshotError, match="chunk 0 is damaged"):
        Saved(snapshot).whole("t")


def test_parts_in_a_hostile_table_are_refused():
    values = torch.arange(12.0).view(3, 4)
    stager = Stager()
    table, encoded, _ = stager.plan({"t": values}, torch.is_tensor, lambda: {"t": whole("t", values)})
    assert boxes(table.pieces[0].parts[0])[0].strides == row_major((3, 4))
    good = '["t",[3,4],[0,0],[3,4],null,[],0,null,0,false]'
    assert good in encoded.decode()
    for bad in (
        '["t",[3,4],[1,0],[3,4],null,[],0,null,0,false]',
        '["t",[3,4],[0,0],[3,4],null,[],1,null,0,false]',
        '["t",[3,4],[0,0],[3,4],[0,13],[],0,null,0,false]',
        '["t",[3,4],[0,0],[3,4],[5,4],[],0,null,0,false]',
        '["t",[3,4],[0,0],[3,4],null,[],0,[5,1],0,false]',
        '["t",[3,4],[0,0],[3,4],null,[],-1,null,0,false]',
        '["t",[3,4],[0,0],[3,4],null,[],0,null,3,false]',
        '["t",[3,4],[0],[3,4],null,[],0,null,0,false]',
        '["t",[1152921504606846977],[0],[0],null,[],0,null,0,false]',
        '["t",[3,4],[0,0],[3,4],[0,1],[],0,[4,1],0,false]',
        "[]",
        "7",
    ):
        with pytest.raises(SnapshotError, match="the tensor table"):
            Table.from_json(encoded.replace(good.encode(), bad.encode()))
