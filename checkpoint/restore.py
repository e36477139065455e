"""Out of a durable snapshot: one rank's manifest, and the chunks of its slab, every checksum on the way checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from crc32c import crc32c

from ..resilience.errors import LayoutError, MachineError, SnapshotError
from . import commit, direct, layout, slabs
from .files import Files
from .image import CRC_BYTES
from .manifest import RankManifest
from .stores import Place

T = TypeVar("T")


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
    snapshot: Place, manifest: RankManifest, work: Callable[[int, memoryview], T], wanted: Sequence[int] | None = None
) -> Iterator[T]:
    """What `work` makes of the payload's chunks, all or those `wanted` (ascending), from the slabs of whoever has written them: of number
    and bytes, which are checked, and overwritten as soon as it returns. In order, though several threads may call it. Raises as `open_rank`
    does, and what `work` raises."""
    every = range(manifest.table.image.chunks) if wanted is None else wanted
    read = (
        _from_shards(snapshot, manifest, work, every)
        if isinstance(snapshot, Files)
        else _from_store(snapshot, manifest, work, every)
    )
    try:
        yield from read
    except OSError as error:  # storage that fails says nothing about what it holds
        raise MachineError(f"{error.filename or snapshot} cannot be read: {error.strerror}") from error


def _from_shards(
    snapshot: Files, manifest: RankManifest, work: Callable[[int, memoryview], T], every: Sequence[int]
) -> Iterator[T]:
    """In the end this rank's own index is looked at."""
    image, sources = manifest.table.image, manifest.sources
    shards = {rank: (snapshot / layout.slab_name(rank)).path / slabs.SHARD for rank in range(manifest.world)}
    places = [(shards[rank], place * image.stride_bytes) for rank, place in (sources.places[index] for index in every)]

    def checked(number: int, memory: memoryview) -> T:
        chunk, stored = memory[:-CRC_BYTES], int.from_bytes(memory[-CRC_BYTES:], "little")
        _check(places[number][0], manifest, every[number], chunk, stored)
        return work(every[number], chunk)

    yield from direct.read(places, image.stride_bytes, checked)
    if sources.own:
        index, shard = image.index(sources.own), shards[manifest.rank]
        if direct.tail(shard, len(sources.own) * image.stride_bytes, len(index)) != index:
            raise SnapshotError(f"{shard}: its index is damaged")


def _from_store(
    snapshot: Place, manifest: RankManifest, work: Callable[[int, memoryview], T], every: Sequence[int]
) -> Iterator[T]:
    """tensorstore has looked at the stored checksums and the indexes."""
    for rank, run in groupby(every, key=lambda index: manifest.sources.places[index][0]):
        slab, some = snapshot / layout.slab_name(rank), list(run)
        for index, chunk in zip(some, slabs.read(slab, manifest.table.image.chunk_bytes, some), strict=True):
            _check(slab, manifest, index, chunk)
            yield work(index, chunk)


def _check(where: object, manifest: RankManifest, index: int, chunk: memoryview, stored: int | None = None) -> None:
    found, expected = crc32c(chunk), manifest.chunk_crc32c[index]
    if found != expected or stored not in (None, expected):
        other = stored in (None, found)
        raise SnapshotError(
            f"{where}: chunk {index} is sound in itself, but not the one that was staged"
            if other
            else f"{where}: chunk {index} is damaged"
        )
