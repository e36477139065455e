"""Out of a durable snapshot: one rank's manifest, and the chunks of its slab, every checksum on the way checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

from crc32c import crc32c

from ..resilience.errors import LayoutError, SnapshotError
from . import commit, direct, layout, slabs
from .files import Files
from .image import CRC_BYTES, Image
from .manifest import RankManifest
from .stores import Place


def open_rank(snapshot: Place, rank: int, world: int = 0) -> RankManifest:
    """What global `rank` has written; with `world`, only if so many ranks wrote it.

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
    if sha256(slab.read(slabs.METADATA)).hexdigest() != manifest.metadata_sha256:
        raise SnapshotError(f"{slab}/{slabs.METADATA} is damaged, or from another attempt")
    if isinstance(slab, Files):
        _measure(slab.path / slabs.SHARD, manifest.table.image.file_bytes)
    return manifest


def _measure(shard: Path, nbytes: int) -> None:
    try:
        size = shard.stat().st_size
    except FileNotFoundError as error:
        raise SnapshotError(f"{shard} is missing") from error
    if size != nbytes:
        raise SnapshotError(f"{shard} has not the {nbytes} bytes that were written")


def chunks(
    snapshot: Place, manifest: RankManifest, wanted: Sequence[int] | None = None
) -> Iterator[tuple[int, memoryview]]:
    """The payload's chunks, all or those `wanted` (ascending): a number and bytes that are overwritten by later ones. Raises as
    `open_rank` does."""
    slab, image = snapshot / layout.slab_name(manifest.rank), manifest.table.image
    every = range(image.chunks) if wanted is None else wanted
    where = slab / slabs.SHARD if isinstance(slab, Files) else slab
    content = (
        _from_shard(slab.path / slabs.SHARD, image, every)
        if isinstance(slab, Files)
        else _from_store(slab, image, every)
    )
    for index, chunk, stored in content:
        found, expected = crc32c(chunk), manifest.chunk_crc32c[index]
        if found != expected or stored not in (None, expected):
            other = stored in (None, found)
            raise SnapshotError(
                f"{where}: chunk {index} is sound in itself, but not the one that was staged"
                if other
                else f"{where}: chunk {index} is damaged"
            )
        yield index, chunk


def _from_shard(shard: Path, image: Image, wanted: Sequence[int]) -> Iterator[tuple[int, memoryview, int | None]]:
    """Number, bytes and stored checksum of each chunk; in the end the index is looked at."""
    for index, memory in direct.read(shard, image, wanted):
        if index < image.chunks:
            yield index, memory[:-CRC_BYTES], int.from_bytes(memory[-CRC_BYTES:], "little")
        elif memory != image.index():
            raise SnapshotError(f"{shard}: its index is damaged")


def _from_store(slab: Place, image: Image, wanted: Sequence[int]) -> Iterator[tuple[int, memoryview, int | None]]:
    """The same from an object store; the stored checksums and the index have been looked at."""
    for index, chunk in slabs.read(slab, image, wanted):
        yield index, chunk, None
