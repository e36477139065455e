"""A rank's payload ⇄ a slab: a one-dimensional zarr v3 array of bytes, in one shard file, checksummed chunk by chunk.

The only module that imports tensorstore. Slabs are named by URL, so that an object store is one more scheme. Each
setting below was measured, or its default loses data silently.
"""

from __future__ import annotations

import errno
import os
import re

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from ..resilience.errors import MachineError, ResilientError, SnapshotError
from .tensors import CHUNK_BYTES

METADATA = "zarr.json"
SHARD = "c/0"
READ_BYTES = 4 * CHUNK_BYTES
"""One request's worth: the library bounds no bytes in flight, and one huge read is the slowest way."""

_CONTEXT = ts.Context(
    {
        "file_io_concurrency": {"limit": 2},  # the other cores train
        "data_copy_concurrency": {"limit": 2},
        "file_io_sync": True,
        "file_io_locking": {"mode": "os"},  # the others leave torn shards or stale lock files behind a kill
        "cache_pool": {"total_bytes_limit": 0},
    }
)
_CRC = {"name": "crc32c"}
_LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}


def shard_bytes(payload_bytes: int, chunk_bytes: int) -> int:
    """Size of the shard file: chunks with a checksum each, an index of (offset, size) pairs, its checksum."""
    return payload_bytes // chunk_bytes * (chunk_bytes + 4 + 16) + 4


def write(url: str, payload: memoryview, chunk_bytes: int) -> None:
    """Write `payload`, a whole number of chunks, as a new slab at `url`; durable but for the directories above it.

    Raises MachineError when the place is full or can't be written, SnapshotError when there is a slab already.
    """
    if len(payload) % chunk_bytes:
        raise SnapshotError(f"a payload of {len(payload)} bytes is not a whole number of chunks of {chunk_bytes}")
    sharding = {
        "chunk_shape": [chunk_bytes],
        "codecs": [{"name": "bytes"}, _CRC],
        "index_codecs": [_LITTLE, _CRC],
        "index_location": "end",
    }
    spec = {
        "driver": "zarr3",
        "kvstore": _directory(url),
        "metadata": {
            "shape": [len(payload)],
            "data_type": "uint8",
            "fill_value": 0,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [len(payload)]}},
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        },
        "store_data_equal_to_fill_value": True,  # or a chunk of zeros is left out, and reads as missing
    }
    try:
        slab = ts.open(spec, context=_CONTEXT, create=True).result()
        # The caller holds the slot still; copying it first would take 1.7 times as long.
        slab.write(np.frombuffer(payload, np.uint8), can_reference_source_data_indefinitely=True).result()
    except ValueError as error:
        raise _sentence(error, url, writing=True) from error


def read_into(url: str, destination: memoryview, start: int = 0) -> None:
    """Fill `destination` with the slab's bytes from `start` on; every chunk that is touched is checked.

    Raises SnapshotError for a missing, torn or altered slab, and for one shorter than asked for; MachineError when storage fails.
    """
    target = np.frombuffer(destination, np.uint8)
    # Without the last one, a missing shard reads as zeros.
    spec = {"driver": "zarr3", "kvstore": _directory(url), "fill_missing_data_reads": False}
    try:
        slab = ts.open(spec, context=_CONTEXT, read=True).result()
        if slab.dtype != ts.uint8 or slab.rank != 1 or slab.shape[0] < start + target.size:
            raise SnapshotError(
                f"{url} is an array of {slab.dtype.name} {slab.shape}, not the slab that was written there"
            )
        for offset in range(0, target.size, READ_BYTES):
            part = target[offset : offset + READ_BYTES]
            source = slab[start + offset : start + offset + part.size].translate_to[0]
            ts.array(part).write(source).result()
    except ValueError as error:
        raise _sentence(error, url, writing=False) from error


def read(url: str, start: int, stop: int) -> NDArray[np.uint8]:
    """The slab's bytes from `start` to `stop`. Raises as `read_into` does."""
    out = np.empty(stop - start, np.uint8)
    read_into(url, out.data, start)
    return out


def _directory(url: str) -> str:
    return url if url.endswith("/") else url + "/"


def _sentence(error: ValueError, url: str, *, writing: bool) -> ResilientError:
    """tensorstore tells its errors apart in their text only: "STATUS: … [os_error_code='28']"."""
    text = str(error).split(" [tensorstore_spec")[0]
    status = text.split(":")[0]
    code = int(found[1]) if (found := re.search(r"os_error_code='(\d+)'", text)) else 0
    if code in (errno.ENOSPC, errno.EDQUOT) or status == "RESOURCE_EXHAUSTED":
        return MachineError(f"{url}: no space left. Free some.")
    if status == "PERMISSION_DENIED":
        return MachineError(
            f"{url}: {os.strerror(code or errno.EACCES)}. This user has to be able to use that directory."
        )
    if status == "ALREADY_EXISTS":
        return SnapshotError(f"{url} holds a slab already; nothing was overwritten")
    if writing:
        return MachineError(f"{url} can't be written: {text}")
    if code not in (0, errno.ENOENT, errno.ENOTDIR) or status in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED"):
        return MachineError(f"{url} cannot be read: {text}")
    if status == "NOT_FOUND":
        return SnapshotError(f"{url} is missing or incomplete ({text})")
    return SnapshotError(f"{url} is damaged ({text})")
