"""Converts a rank's payload (its tensors' bytes) into a slab and back. A slab is a zarr v3 array of bytes, with one row and one checksum
per chunk, in shards.

tensorstore defines the format; `direct_io.py` writes the same file. In a directory, a slab is one shard. In an object store it is several
shards, because S3 accepts at most 5 GiB in one request. Each of tensorstore's settings below was chosen by a measurement, or because its
default loses data silently.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from ...resilience.errors import SnapshotError
from ...resilience.ipc.file_descriptors import high
from ..backend import object_store
from ..backend.filesystem import Files
from ..backend.object_store import Objects
from ..backend.place import Place
from ..format.shard_image import Image

METADATA = "zarr.json"
SHARD = "c/0/0"
"""Name of the only shard of a slab in a directory."""
OBJECT_CHUNKS = 32
"""Chunks per shard in an object store: 128 MiB."""
_PUTS = 3
"""Number of concurrent uploads of shards."""
_READ_CHUNKS = 4
"""Chunks per read request. The library does not limit the bytes in flight, and one huge read is the slowest way."""

_FILES = ts.Context(
    {
        "file_io_concurrency": {"limit": 2},  # the other cores train
        "data_copy_concurrency": {"limit": 2},
        "file_io_sync": True,
        "file_io_locking": {"mode": "os"},  # other modes leave torn shards or stale lock files after a kill
        "cache_pool": {"total_bytes_limit": 0},
    }
)
_CRC = {"name": "crc32c"}
_LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}


def create(slab: Place, image: Image) -> ts.TensorStore:
    """Write the metadata of a new slab, and return its array. Raises MachineError if the storage is full or not writable. In a directory,
    raises SnapshotError if a slab exists already. In an object store, an existing slab is continued, because the same attempt has the same
    bytes."""
    sharding = {
        "chunk_shape": [1, image.chunk_bytes],
        "codecs": [{"name": "bytes"}, _CRC],
        "index_codecs": [_LITTLE, _CRC],
        "index_location": "end",
    }
    metadata = {
        "shape": [image.chunks, image.chunk_bytes],
        "data_type": "uint8",
        "fill_value": 0,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [_shard_chunks(slab, image), image.chunk_bytes]},
        },
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }
    # Without store_data_equal_to_fill_value, tensorstore does not write a chunk of zeros, and a reader finds it missing.
    spec = {**_driver(slab), "metadata": metadata, "store_data_equal_to_fill_value": True}
    future = ts.open(spec, context=_context(slab), create=True, open=not isinstance(slab, Files))
    return _done(future, slab, writing=True)


def write(slab: Files, memory: memoryview, image: Image, chunks: Sequence[int]) -> list[int]:
    """Write `chunks` (ascending) of `memory`, laid out as `image`, as a new slab in a directory. On return, the slab itself is durable, but
    the directories above it are not. Return the checksum of each chunk; they are also written into `memory`. Raises as `create` does."""
    crcs = image.seal(memory, chunks)
    array, rows = create(slab, image), _rows(memory, image)
    if len(chunks) == image.chunks:
        # No copy is needed, because the caller keeps the slot unchanged. With a copy, the write would take 1.7 times as long.
        _done(array.write(rows, can_reference_source_data_indefinitely=True), slab, writing=True)
    elif chunks:
        some = list(chunks)
        _done(array[some].write(ts.array(rows)[some], can_reference_source_data_indefinitely=True), slab, writing=True)
    return crcs


def put(
    slab: Objects, memory: memoryview, image: Image, chunks: Sequence[int], pace: Callable[[int], None]
) -> list[int]:
    """Write a slab into an object store, shard by shard. Each shard is copied out of `memory` and uploaded whole, even if the store has it
    already. tensorstore's own writer would first read back a last shard that is not full, and then upload the shard with a condition, which
    Swift refuses.

    pace: called before each shard with its number of bytes.
    """
    create(slab, image)
    room, crcs = _shard_chunks(slab, image), []
    coming: deque[tuple[ts.Future, int]] = deque()
    for number, group in groupby(chunks, key=lambda chunk: chunk // room):
        shard = list(group)
        crcs += image.seal(memory, shard)
        content = b"".join(
            [*(image.sealed(memory, chunk) for chunk in shard), image.index([c % room for c in shard], room)]
        )
        pace(len(content))
        coming.append((slab.kv.write(f"c/{number}/0", content), len(content)))
        if len(coming) == _PUTS:
            _uploaded(coming, slab)
    while coming:
        _uploaded(coming, slab)
    return crcs


def _uploaded(coming: deque[tuple[ts.Future, int]], slab: Objects) -> None:
    """Wait for the first of the uploads. The others share the bandwidth meanwhile, so it may take as long as all of them."""
    nbytes = sum(nbytes for _, nbytes in coming)
    _done(coming.popleft()[0], slab, nbytes, writing=True)


def read(slab: Place, chunk_bytes: int, wanted: Sequence[int]) -> Iterator[memoryview]:
    """Yield the chunks in `wanted`, each verified against the slab's own checksum. Later chunks overwrite the bytes, so use them
    immediately.

    Raises SnapshotError if the slab is missing, torn, altered, or has another form. Raises MachineError if the storage fails.
    """
    # Without fill_missing_data_reads=False, a missing shard reads as zeros.
    spec = {**_driver(slab), "fill_missing_data_reads": False}
    buffer = np.empty((_READ_CHUNKS, chunk_bytes), np.uint8)
    array = _done(ts.open(spec, context=_context(slab), read=True), slab)
    chunks, width = array.shape if array.rank == 2 else (0, 0)
    if array.dtype != ts.uint8 or width != chunk_bytes or chunks <= max(wanted, default=-1):
        raise SnapshotError(
            f"{slab} is an array of {array.dtype.name} {array.shape}, not the slab that was written there"
        )
    for at in range(0, len(wanted), _READ_CHUNKS):
        some = wanted[at : at + _READ_CHUNKS]
        _done(ts.array(buffer[: len(some)]).write(array[list(some)]), slab, buffer.nbytes)
        yield from (row.data for row in buffer[: len(some)])


def _shard_chunks(slab: Place, image: Image) -> int:
    return image.chunks if isinstance(slab, Files) else min(OBJECT_CHUNKS, image.chunks)


def _driver(slab: Place) -> dict[str, Any]:
    url_or_spec = f"{_in_utf8(slab.path.absolute()).as_uri()}/" if isinstance(slab, Files) else slab.kv.spec().to_json()
    return {"driver": "zarr3", "kvstore": url_or_spec}


def _in_utf8(path: Path) -> Path:
    """Return a name in UTF-8 for the same directory, because tensorstore accepts no other encoding."""
    last = max((n for n, part in enumerate(path.parts) if not _is_utf8(part)), default=-1)
    return Path(_opened(Path(*path.parts[: last + 1])), *path.parts[last + 1 :]) if last >= 0 else path


def _is_utf8(part: str) -> bool:
    return not any(0xDC80 <= ord(letter) <= 0xDCFF for letter in part)


@cache
def _opened(directory: Path) -> str:
    return f"/proc/self/fd/{high(os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))}"


def _context(slab: Place) -> ts.Context:
    return _FILES if isinstance(slab, Files) else object_store.context()


def _done(future: ts.Future | ts.WriteFutures, slab: Place, nbytes: int = 0, *, writing: bool = False) -> Any:
    """Return the result of `future`. In a directory, there is no time limit: an abandoned write would continue during the next try."""
    return object_store.done(future, str(slab), nbytes, writing=writing, bounded=not isinstance(slab, Files))


def _rows(memory: memoryview, image: Image) -> NDArray[np.uint8]:
    """Return the chunks as rows of an array, without a copy."""
    whole = np.frombuffer(memory, np.uint8)
    return np.lib.stride_tricks.as_strided(
        whole, (image.chunks, image.chunk_bytes), (image.stride_bytes, 1), writeable=False
    )
