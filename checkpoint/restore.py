"""Out of a snapshot on disk: the table and bytes of one rank, every checksum on the way checked."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import numpy as np
from crc32c import crc32c

from ..resilience.errors import LayoutError, SnapshotError
from . import commit, layout, slabs
from .tensors import Table


def open_rank(snapshot: Path, rank: int, world: int = 0) -> tuple[Table, memoryview]:
    """Table and payload (fresh, writable memory) of global `rank`; with `world`, only if so many ranks wrote it.

    Raises LayoutError when they were others; SnapshotError, in one sentence, when anything is missing, damaged, or from another
    attempt; MachineError or OSError when storage does not give it, which says nothing about the snapshot.
    """
    promised = commit.read_commit(snapshot)
    if world and world != promised.world:
        raise LayoutError(f"{snapshot} was written by {promised.world} ranks, and this job has {world}")
    if not 0 <= rank < promised.world:
        raise SnapshotError(f"{snapshot} was written by {promised.world} ranks; there is no rank {rank} in it")
    manifest = commit.read_manifest(snapshot, rank, promised.ranks[rank])
    commit.check(manifest, snapshot, rank, promised.world)
    slab = snapshot / layout.slab_name(rank)
    if sha256(commit.read(slab / slabs.METADATA)).hexdigest() != manifest.metadata_sha256:
        raise SnapshotError(f"{slab / slabs.METADATA} is damaged, or from another attempt")
    shard = slab / slabs.SHARD
    try:
        size = shard.stat().st_size
    except FileNotFoundError as error:
        raise SnapshotError(f"{shard} is missing") from error
    if size != manifest.shard_bytes:
        raise SnapshotError(f"{shard} has not the {manifest.shard_bytes} bytes that were written")
    payload = np.empty(manifest.table.payload_bytes, np.uint8).data
    slabs.read_into(slab.absolute().as_uri(), payload)
    size = manifest.table.chunk_bytes
    for index, expected in enumerate(manifest.chunk_crc32c):
        if crc32c(payload[index * size : (index + 1) * size]) != expected:
            raise SnapshotError(f"{shard}: chunk {index} is sound in itself, but not the one that was staged")
    return manifest.table, payload
