"""Whatever a snapshot says: it is refused in a sentence or it is read, and nothing else comes of it.

Here few examples are drawn, always the same ones. HOSTILE_EXAMPLES=8000 draws so many others for each test, each of which may take 2 s.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mt_resilient.checkpoint.arena import arena
from mt_resilient.checkpoint.arena.arena import Slot, State
from mt_resilient.checkpoint.arena.slot import image_offset, table_of
from mt_resilient.checkpoint.arena.slot_header import HEADER_BYTES, Header
from mt_resilient.checkpoint.backend import paths
from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.checkpoint.durable import catalog
from mt_resilient.checkpoint.durable.load_resharded import Saved
from mt_resilient.checkpoint.durable.snapshot_view import Contents, batches
from mt_resilient.checkpoint.format.manifest import FORMAT, Commit
from mt_resilient.checkpoint.format.tensor_table import Table, plan
from mt_resilient.checkpoint.slabs import zarr_slab
from mt_resilient.resilience.errors import FormatError, LayoutError, MachineError, SnapshotError, UsageError

from ..hostile import changed, encoded, read_as_zarr, reseal, scratched, sharded, sign_figures, trained, write_manifest

pytestmark = pytest.mark.xdist_group("hostile")

MANY = "HOSTILE_EXAMPLES" in os.environ
hostile = settings(
    deadline=2000 if MANY else None,
    max_examples=int(os.environ.get("HOSTILE_EXAMPLES", "60")),
    derandomize=not MANY,
    database=None,
    suppress_health_check=list(HealthCheck),
)
Refused = (SnapshotError, FormatError, MachineError, LayoutError, UsageError)
Sound = tuple[Files, dict[Path, bytes]]


@pytest.fixture(scope="module", params=[trained, sharded])
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sound:
    """A snapshot, and the bytes of its files."""
    snapshot = request.param(tmp_path_factory.mktemp("hostile"))
    return snapshot, {path: path.read_bytes() for path in snapshot.path.rglob("*") if path.is_file()}


@pytest.fixture(autouse=True)
def restored(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "sound" in request.fixturenames:
        put_back(request.getfixturevalue("sound"))


@contextmanager
def damaging(sound: Sound) -> Iterator[None]:
    """A block that may do to its files what it likes: they are put back."""
    try:
        yield
    finally:
        put_back(sound)


def put_back(sound: Sound) -> None:
    for path, content in sound[1].items():
        path.write_bytes(content)


def read_all(snapshot: Files) -> None:
    """By every reader there is."""
    readers: list[Callable[[], Any]] = [
        lambda: catalog.verify(snapshot),
        lambda: catalog.digest(snapshot),
        lambda: Saved(snapshot).digest(),
        lambda: read_as_zarr(snapshot),
        lambda: contents(snapshot),
    ]
    for read in readers:
        with suppress(*Refused):
            read()


def contents(snapshot: Files) -> None:
    found = Contents(Saved(snapshot, proving=True))
    for batch in batches(list(found.tensors.values()), 1 << 20):
        found.read(batch)


@hostile
@given(st.data())
def test_a_manifest_that_was_meant_to_harm(sound: Sound, data: st.DataObject) -> None:
    snapshot, files = sound
    rank = data.draw(st.integers(0, 1))
    parsed = json.loads(files[snapshot.path / paths.manifest_name(rank)])
    with damaging(sound):
        write_manifest(snapshot, rank, encoded(data.draw(changed(parsed))))
        reseal(snapshot)
        read_all(snapshot)


@hostile
@given(st.data())
def test_a_manifest_with_damaged_bytes(sound: Sound, data: st.DataObject) -> None:
    snapshot, files = sound
    with damaging(sound):
        write_manifest(snapshot, 0, data.draw(scratched(files[snapshot.path / paths.manifest_name(0)])))
        reseal(snapshot)
        read_all(snapshot)


@hostile
@given(st.data())
def test_a_commit(sound: Sound, data: st.DataObject) -> None:
    snapshot, files = sound
    path = snapshot.path / paths.COMMIT
    with damaging(sound):
        if data.draw(st.booleans()):
            found = data.draw(changed(json.loads(files[path])))
            if isinstance(found, dict):
                sign_figures(found.get("figures"))
            path.write_bytes(encoded(found))
        else:
            path.write_bytes(data.draw(scratched(files[path])))
        with suppress(*Refused):
            Commit.from_json(path.read_bytes())
        catalog.stored(Files(snapshot.path.parents[1]), catalog.look(Files(snapshot.path.parents[1])).durable, {})
        read_all(snapshot)


@hostile
@given(st.data())
def test_metadata_of_a_slab(sound: Sound, data: st.DataObject) -> None:
    """As an object store's slabs are read: by what their zarr.json says."""
    snapshot, files = sound
    slab = snapshot / paths.slab_name(0)
    path = slab.path / zarr_slab.METADATA
    chunk_bytes = json.loads(files[path])["shape"][1]
    with damaging(sound):
        parsed = json.loads(files[path])
        path.write_bytes(
            data.draw(changed(parsed).map(encoded) if data.draw(st.booleans()) else scratched(files[path]))
        )
        with suppress(*Refused):
            list(zarr_slab.read(slab, chunk_bytes, [0]))
        with suppress(*Refused):
            Saved(snapshot)


@hostile
@given(st.data())
def test_a_table(data: st.DataObject) -> None:
    skeleton = {"dict": [["a", {"leaf": "a"}], ["n", [1, {"float": "7ff8000000000000"}]]]}
    table = plan(skeleton, [("a", "float32", (4, 4)), ("b", "bfloat16", (3,))])
    sound = table.to_json()
    found = data.draw(changed(json.loads(sound)).map(encoded) if data.draw(st.booleans()) else scratched(sound))
    with suppress(*Refused):
        again = Table.from_json(found)
        assert all(piece.offset + piece.nbytes <= again.payload_bytes for piece in again.pieces)
        again.described()


numbers = st.sampled_from([0, 1, 2, 3, 4096, 8192, 1 << 31, 1 << 44, 1 << 62, -1, -(1 << 63)])


@hostile
@given(st.lists(numbers, min_size=13, max_size=13), st.integers(0, 13), st.booleans(), st.data())
def test_a_slot(drawn: list[int], sound_ones: int, signed: bool, data: st.DataObject) -> None:
    (fd,) = arena.create(1, 1)[0]
    table = plan(None, [("a", "float32", (4, 4))])
    try:
        slot = Slot(f"/proc/self/fd/{fd}")
        wanted = Header(generation=1, step=1, rank=0, world=1, pieces=1, payload_bytes=table.payload_bytes)
        assert slot.begin(wanted, table.to_json()) is not None
        slot.staged()
        slot.seal()
        page = os.pread(fd, HEADER_BYTES, 0)
        known = list(struct.unpack_from("<13q", page, 8))
        for place in data.draw(st.lists(st.integers(0, 12), max_size=13 - sound_ones)):
            known[place] = drawn[place]
        known[0] = data.draw(st.sampled_from([*State]))
        page = page[:8] + struct.pack("<13q", *known)
        page += struct.pack("<q", crc32c(page[32:]) if signed else data.draw(numbers))
        os.pwrite(fd, page, 0)
        header = slot.header()
        words = slot.words()
        assert words is None or (words[0].whole and len(words[2]) == words[0].pieces)
        with slot.reading() as view:
            if view is not None:
                assert len(view.memory) == header.image.memory_bytes
                assert len(view.fingerprints) == header.pieces
                assert image_offset(len(view.table), header.pieces) <= header.image_offset
                with suppress(*Refused):
                    table_of(view.header, view.table)
                del view
        slot.close()
    finally:
        os.close(fd)


@given(st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda x: st.lists(x, max_size=3), max_leaves=9))
def test_any_json_is_no_commit(found: Any) -> None:
    for data in (json.dumps(found), json.dumps({"format": FORMAT, "attempt": found, "ranks": [found]})):
        with pytest.raises(SnapshotError):
            Commit.from_json(data.encode())


def test_the_sound_one_is_read(sound: Sound) -> None:
    snapshot, _ = sound
    found = Contents(Saved(snapshot, proving=True))
    assert catalog.verify(snapshot) == []
    assert {"model/t"} < found.tensors.keys()
    if "model/c" in found.tensors:
        assert list(found.tensors) == ["model/c", "model/f", "model/t", "rank-00000/own", "rank-00001/own"]
        assert [tensor.shape for tensor in found.tensors.values()] == [(3, 4), (9,), (3, 4), (5,), (4,)]
    contents(snapshot)
    read_as_zarr(snapshot)
    assert np.array_equal(found.read([found.tensors["model/t"]])[0].shape, (24,) if len(found.tensors) == 4 else (12,))
