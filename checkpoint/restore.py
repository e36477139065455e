"""Out of a durable snapshot: one rank's manifest, and the chunks of its slab, every checksum on the way checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

from crc32c import crc32c

from ..resilience.errors import LayoutError, MachineError, SnapshotError
from . import commit, direct, layout, slabs
from .files import Files
from .image import CRC_BYTES
from .manifest import RankManifest
from .stores import Place

_Chunk: TypeAlias = tuple[object, memoryview, int | None]
"""File, bytes and stored checksum."""


def open_rank(snapshot: Place, rank: int, world: int = 0) -> RankManifest:
    """What global `rank` has written; with `world`, only if so many ranks wrote it.

    Raises LayoutError when they were others; FormatError when another version of this program wrote it; SnapshotError, in one sentence,
    when anything is missing, damaged, or from another attempt; MachineError when storage does not give it, which says nothing about the
    snapshot.
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
        _measure(slab.path / slabs.SHARD, manifest.table.image.file_bytes(len(manifest.sources.own)))
    return manifest


def _measure(shard: Path, nbytes: int) -> None:
    if not nbytes:  # others have written all of it
        return
    try:
        size = shard.stat().st_size
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SnapshotError(f"{shard} is missing") from error
    except OSError as error:
        raise MachineError(f"{shard} cannot be read: {error.strerror}") from error
    if size != nbytes:
        raise SnapshotError(f"{shard} has not the {nbytes} bytes that were written")


def chunks(
    snapshot: Place, manifest: RankManifest, wanted: Sequence[int] | None = None
) -> Iterator[tuple[int, memoryview]]:
    """The payload's chunks, all or those `wanted` (ascending), from the slabs of whoever has written them: a number and bytes that are
    overwritten by later ones. Raises as `open_rank` does."""
    every = range(manifest.table.image.chunks) if wanted is None else wanted
    content = (
        _from_shards(snapshot, manifest, every)
        if isinstance(snapshot, Files)
        else _from_store(snapshot, manifest, every)
    )
    for index, (where, chunk, stored) in zip(every, _read(snapshot, content), strict=True):
        found, expected = crc32c(chunk), manifest.chunk_crc32c[index]
        if found != expected or stored not in (None, expected):
            other = stored in (None, found)
            raise SnapshotError(
                f"{where}: chunk {index} is sound in itself, but not the one that was staged"
                if other
                else f"{where}: chunk {index} is damaged"
            )
        yield index, chunk


def _read(snapshot: Place, content: Iterator[_Chunk]) -> Iterator[_Chunk]:
    """Storage that fails says nothing about what it holds."""
    try:
        yield from content
    except OSError as error:
        raise MachineError(f"{error.filename or snapshot} cannot be read: {error.strerror}") from error


def _from_shards(snapshot: Files, manifest: RankManifest, every: Sequence[int]) -> Iterator[_Chunk]:
    """Each chunk; in the end this rank's own index is looked at."""
    image, sources = manifest.table.image, manifest.sources
    shards = {rank: (snapshot / layout.slab_name(rank)).path / slabs.SHARD for rank in range(manifest.world)}
    places = [sources.places[index] for index in every]
    read = direct.read([(shards[rank], place * image.stride_bytes) for rank, place in places], image.stride_bytes)
    for (rank, _), memory in zip(places, read, strict=True):
        yield shards[rank], memory[:-CRC_BYTES], int.from_bytes(memory[-CRC_BYTES:], "little")
    if sources.own:
        index, shard = image.index(sources.own), shards[manifest.rank]
        if direct.tail(shard, len(sources.own) * image.stride_bytes, len(index)) != index:
            raise SnapshotError(f"{shard}: its index is damaged")


def _from_store(snapshot: Place, manifest: RankManifest, every: Sequence[int]) -> Iterator[_Chunk]:
    """The same from an object store; the stored checksums and the indexes have been looked at."""
    by_rank = groupby(every, key=lambda index: manifest.sources.places[index][0])
    for slab, run in ((snapshot / layout.slab_name(rank), list(run)) for rank, run in by_rank):
        yield from ((slab, chunk, None) for chunk in slabs.read(slab, manifest.table.image.chunk_bytes, run))
