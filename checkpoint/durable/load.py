"""Reads one rank's manifest and the chunks of its slab from a snapshot on disk, and verifies every checksum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

from crc32c import crc32c

from ...resilience.errors import LayoutError, MachineError, SnapshotError
from ..backend import paths
from ..backend.filesystem import Files
from ..backend.place import Place
from ..format import fingerprint
from ..format.manifest import Commit, RankManifest
from ..format.shard_image import CRC_BYTES
from ..slabs import direct_io, zarr_slab
from . import commit

_Chunk: TypeAlias = tuple[object, memoryview, int | None]
"""Source file (or slab), bytes, and stored checksum."""


def open_rank(snapshot: Place, rank: int, world: int = 0, promised: Commit | None = None) -> RankManifest:
    """Return the manifest of global `rank`. If `world` is given, that many ranks must have written the snapshot. promised: the content of
    COMMIT, if it was read already.

    Raises LayoutError if another number of ranks wrote it. Raises FormatError if another version of this program did. Raises SnapshotError,
    in one sentence, if anything is missing, damaged, or from another attempt. Raises MachineError if the storage fails, which says nothing
    about the snapshot.
    """
    promised = promised or commit.read_commit(snapshot)
    if world and world != promised.world:
        raise LayoutError(f"{snapshot} was written by {promised.world} ranks, and this job has {world}")
    if not 0 <= rank < promised.world:
        raise SnapshotError(f"{snapshot} was written by {promised.world} ranks; there is no rank {rank} in it")
    manifest = commit.read_manifest(snapshot, rank, promised)
    slab = snapshot / paths.slab_name(rank)
    if sha256(slab.read(zarr_slab.METADATA)).hexdigest() != manifest.metadata_sha256:
        raise SnapshotError(f"{slab}/{zarr_slab.METADATA} is damaged, or from another attempt")
    if isinstance(snapshot, Files):
        _measure(snapshot, manifest)
    return manifest


def open_ranks(snapshot: Place) -> list[RankManifest]:
    """Return the manifests of all ranks. Raises as `open_rank` does."""
    promised = commit.read_commit(snapshot)
    return [open_rank(snapshot, rank, promised=promised) for rank in range(promised.world)]


def _measure(snapshot: Files, manifest: RankManifest) -> None:
    """Raise SnapshotError unless the files have the bytes that the table describes. Called before memory is allocated for these bytes. This
    rank's own file must have exactly the described size, and the other ranks' files at least the bytes that this rank needs."""
    image, sources = manifest.table.image, manifest.sources
    for rank, end in sources.ends.items():
        own = rank == manifest.rank
        shard, nbytes = _shard(snapshot, rank), image.file_bytes(len(sources.own)) if own else end * image.stride_bytes
        try:
            size = shard.stat().st_size
        except (FileNotFoundError, NotADirectoryError) as error:
            raise SnapshotError(f"{shard} is missing") from error
        except OSError as error:
            raise MachineError(f"{shard} cannot be read: {error.strerror}") from error
        if size < nbytes or (own and size != nbytes):
            raise SnapshotError(f"{shard} has {size} bytes, and not the {nbytes} that were written")


def _shard(snapshot: Files, rank: int) -> Path:
    return (snapshot / paths.slab_name(rank)).path / zarr_slab.SHARD


def proved(snapshot: Place, manifest: RankManifest) -> Iterator[tuple[int, memoryview]]:
    """Yield all chunks of the payload, as `chunks` does. After the last chunk, verify the fingerprints of all tensors."""
    by_chunk, words = manifest.table.by_chunk(), [0] * len(manifest.table.pieces)
    for index, chunk in chunks(snapshot, manifest):
        for number, done, at, run in by_chunk.get(index, ()):
            words[number] ^= fingerprint.of_part(chunk[at : at + run], done)
        yield index, chunk
    for number, word in enumerate(words):
        check_word(snapshot, manifest, number, word)


def check_word(snapshot: Place, manifest: RankManifest, number: int, word: int) -> None:
    """Raise SnapshotError unless `word` is the fingerprint that the table's piece had when it was saved."""
    found, expected = f"{word:016x}", manifest.fingerprints[number]
    if found != expected:
        raise SnapshotError(
            f"{snapshot}: tensor {manifest.table.pieces[number].name!r} of rank {manifest.rank} has the fingerprint "
            f"{found}, and was saved with {expected}"
        )


def chunks(
    snapshot: Place, manifest: RankManifest, wanted: Sequence[int] | None = None
) -> Iterator[tuple[int, memoryview]]:
    """Yield the payload's chunks as (number, bytes): all of them, or those in `wanted` (ascending). Each chunk is read from the slab of the
    rank that wrote it. Use the bytes immediately: a later chunk reuses the buffer. Raises as `open_rank` does."""
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
                f"{where}: chunk {index} is undamaged, but is not the chunk that was staged"
                if other
                else f"{where}: chunk {index} is damaged"
            )
        yield index, chunk


def _read(snapshot: Place, content: Iterator[_Chunk]) -> Iterator[_Chunk]:
    """Yield from `content`. An OSError becomes MachineError, because failing storage says nothing about the data in it."""
    try:
        yield from content
    except OSError as error:
        raise MachineError(f"{error.filename or snapshot} cannot be read: {error.strerror}") from error


def _from_shards(snapshot: Files, manifest: RankManifest, every: Sequence[int]) -> Iterator[_Chunk]:
    """Yield each chunk. After the last chunk, verify the index of this rank's own shard file."""
    image, sources = manifest.table.image, manifest.sources
    shards = {rank: _shard(snapshot, rank) for rank in {manifest.rank, *sources.ends}}
    places = [sources.places[index] for index in every]
    read = direct_io.read([(shards[rank], place * image.stride_bytes) for rank, place in places], image.stride_bytes)
    for (rank, _), memory in zip(places, read, strict=True):
        yield shards[rank], memory[:-CRC_BYTES], int.from_bytes(memory[-CRC_BYTES:], "little")
    if sources.own:
        index, shard = image.index(sources.own), shards[manifest.rank]
        if direct_io.tail(shard, len(sources.own) * image.stride_bytes, len(index)) != index:
            raise SnapshotError(f"{shard}: its index is damaged")


def _from_store(snapshot: Place, manifest: RankManifest, every: Sequence[int]) -> Iterator[_Chunk]:
    """Yield each chunk from an object store. tensorstore has verified the stored checksums and the indexes."""
    by_rank = groupby(every, key=lambda index: manifest.sources.places[index][0])
    for slab, run in ((snapshot / paths.slab_name(rank), list(run)) for rank, run in by_rank):
        yield from ((slab, chunk, None) for chunk in zarr_slab.read(slab, manifest.table.image.chunk_bytes, run))
