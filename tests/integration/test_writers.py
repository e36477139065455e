"""Two writers, one format: what the stream of direct I/O leaves is what tensorstore leaves, byte for byte."""

import mmap
import os
import socket
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tensorstore
import zarr

from mt_resilient.checkpoint.arena.arena import View
from mt_resilient.checkpoint.arena.slot_header import Header
from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.checkpoint.format.shard_image import CHUNK_BYTES, Image, padded
from mt_resilient.checkpoint.slabs import direct_io, zarr_slab
from mt_resilient.checkpoint.slabs.slab_writer import TRIAL_BYTES, Direct, Fastest, by_tensorstore
from mt_resilient.resilience import clock
from mt_resilient.resilience.errors import SnapshotError

BLOCK = direct_io.BLOCK_BYTES // (CHUNK_BYTES + 4) * CHUNK_BYTES
SIZES = [1, 4092, 4093, 100_000, CHUNK_BYTES, CHUNK_BYTES + 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3 * CHUNK_BYTES]


def view(nbytes: int, *, seed: int = 0) -> View:
    image = Image(padded(nbytes))
    memory = memoryview(mmap.mmap(-1, image.memory_bytes))
    noise = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).tobytes()
    for index in range(image.chunks):  # the last chunk's rest stays zero, as do whole chunks: the fill value
        part = noise[index * image.chunk_bytes : (index + 1) * image.chunk_bytes] if index != 1 else b""
        image.chunk(memory, index)[: len(part)] = part
    header = Header(payload_bytes=image.payload_bytes)
    return View(header=header, table=b"", fingerprints=np.zeros(0, np.uint64), memory=memory)


def files(slab: Path) -> dict[str, bytes]:
    return {str(path.relative_to(slab)): path.read_bytes() for path in slab.rglob("*") if path.is_file()}


@pytest.mark.parametrize("nbytes", SIZES)
def test_both_leave_the_same_files_and_checksums(tmp_path, nbytes):
    held = view(nbytes)
    every = range(held.header.image.chunks)
    assert by_tensorstore(Files(tmp_path / "a"), held, every) == Direct()(Files(tmp_path / "b"), held, every)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert files(tmp_path / "a").keys() == {zarr_slab.METADATA, zarr_slab.SHARD}


@pytest.mark.parametrize("some", [[0], [5], [0, 1, 2, 3, 4], [1, 3, 5, 7, 9], [0, 2, 3, 9, 10], [6, 7, 8, 9, 10], []])
def test_both_leave_out_the_chunks_that_others_write(tmp_path, some):
    held = view(11 * CHUNK_BYTES)
    image = held.header.image
    assert by_tensorstore(Files(tmp_path / "a"), held, some) == Direct()(Files(tmp_path / "b"), held, some)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert len(files(tmp_path / "a").get(zarr_slab.SHARD, b"")) == image.file_bytes(len(some))
    for slab in (tmp_path / "a", tmp_path / "b"):
        read = [bytes(chunk) for chunk in zarr_slab.read(Files(slab), image.chunk_bytes, some)]
        assert read == [bytes(image.chunk(held.memory, index)) for index in some]
        missing = next(index for index in range(11) if index not in some)
        with pytest.raises(SnapshotError, match="missing"):
            list(zarr_slab.read(Files(slab), image.chunk_bytes, [missing]))


@pytest.mark.parametrize("nbytes", SIZES)
def test_whatever_wrote_it_everybody_reads_the_same(tmp_path, nbytes):
    held = view(nbytes)
    image, slab = held.header.image, tmp_path / "slab"
    every = range(image.chunks)
    Direct()(Files(slab), held, every)
    expected = [bytes(chunk) for _, chunk in held.chunks()]
    assert [bytes(chunk) for chunk in zarr_slab.read(Files(slab), image.chunk_bytes, every)] == expected
    assert [bytes(chunk[:-4]) for chunk in direct_io.read(places(slab, image, every), image.stride_bytes)] == expected
    index = image.index(every)
    assert direct_io.tail(slab / zarr_slab.SHARD, image.memory_bytes, len(index)) == index
    assert [np.asarray(row).tobytes() for row in zarr.open_array(slab, mode="r")[:]] == expected
    opened = tensorstore.open({"driver": "auto", "kvstore": f"file://{slab}/"}).result()
    assert opened[image.chunks - 1].read().result().tobytes() == expected[-1]


@pytest.mark.parametrize("wanted", [[], [0], [5], [0, 2, 3, 9], list(range(2, 11))])
def test_only_the_chunks_that_are_wanted_are_read(tmp_path, wanted):
    held = view(11 * CHUNK_BYTES)
    image, slab = held.header.image, tmp_path / "slab"
    Direct()(Files(slab), held, range(11))
    expected = [bytes(image.chunk(held.memory, index)) for index in wanted]
    assert [bytes(chunk[:-4]) for chunk in direct_io.read(places(slab, image, wanted), image.stride_bytes)] == expected
    assert [bytes(chunk) for chunk in zarr_slab.read(Files(slab), image.chunk_bytes, wanted)] == expected


def places(slab: Path, image: Image, chunks: Iterable[int]) -> list[tuple[Path, int]]:
    return [(slab / zarr_slab.SHARD, index * image.stride_bytes) for index in chunks]


def read_all(slab: Path, image: Image) -> None:
    for _ in direct_io.read(places(slab, image, range(image.chunks)), image.stride_bytes):
        pass
    direct_io.tail(slab / zarr_slab.SHARD, image.memory_bytes, len(image.index(range(image.chunks))))


@pytest.mark.parametrize("length", [0, 1, 4096, 3 * (CHUNK_BYTES + 4), -5000, -1])
def test_a_file_that_ends_early_is_a_sentence(tmp_path, length):
    held = view(5 * CHUNK_BYTES)
    image, slab = held.header.image, tmp_path / "slab"
    every = range(image.chunks)
    Direct()(Files(slab), held, every)
    os.truncate(slab / zarr_slab.SHARD, length % image.file_bytes(len(every)))
    with pytest.raises(SnapshotError, match="ends at byte"):
        read_all(slab, image)
    with pytest.raises(SnapshotError):
        list(zarr_slab.read(Files(slab), image.chunk_bytes, every))


def test_a_slab_that_is_there_is_not_overwritten(tmp_path):
    for name, writer in (("a", by_tensorstore), ("b", Direct())):
        writer(Files(tmp_path / name), view(100), [0])
        with pytest.raises(SnapshotError, match="holds a slab already"):
            writer(Files(tmp_path / name), view(100), [0])


def test_a_limit_is_kept_by_all_slabs_together(tmp_path):
    held = [view(8 * CHUNK_BYTES) for _ in range(2)]
    writer, started = Direct(bytes_per_s=64e6), clock.monotonic_s()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda number: writer(Files(tmp_path / str(number)), held[number], range(8)), range(2)))
    assert clock.monotonic_s() - started > 0.9 * 64 / 64, "twice 32 MiB, less a burst, at 64 MB/s"


def test_the_trial_leaves_nothing_and_sweeps_what_a_killed_one_left(tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    host = socket.gethostname()
    left, alive, elsewhere = (
        tmp_path / f"snapshots/.trial-{name}" for name in (f"{host}-{dead.pid}", f"{host}-1", f"x{host}-{dead.pid}")
    )
    for place in (left, alive, elsewhere):
        place.mkdir(parents=True)
    writer = Fastest(Files(tmp_path))
    writer(Files(tmp_path / "small"), view(100), [0])
    writer(Files(tmp_path / "shared"), view(2 * TRIAL_BYTES), [5])
    assert left.exists(), "small slabs are no matter"
    writer(Files(tmp_path / "large"), view(TRIAL_BYTES), range(4))
    assert {*(tmp_path / "snapshots").iterdir()} == {alive, elsewhere}, "in use, here or on another node"
    assert files(tmp_path / "large").keys() == {zarr_slab.METADATA, zarr_slab.SHARD}
