"""Writes each rank's part of a snapshot on one node: its slab (the file with its tensors), and then its manifest. If several ranks share
the same chunks, each rank writes only some of them.

views of slots → `divide` → `write`
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from hashlib import sha256

import numpy as np
from crc32c import crc32c

from ...resilience.errors import SnapshotError
from ..arena.arena import View
from ..arena.slot import table_of
from ..backend import paths
from ..backend.filesystem import Files
from ..backend.object_store import Objects
from ..backend.place import Place
from ..format import fingerprint, shared_chunks
from ..format.manifest import RankManifest
from ..format.shared_chunks import Sources
from ..format.tensor_table import Table
from . import zarr_slab
from .slab_writer import Writer

AT_A_TIME = {Files: 8, Objects: 1}
"""Number of slabs written concurrently. A memory file system takes 2.7 GB/s in one file, however many threads write to it. In 4 files it
takes 10.7 GB/s, in 8 files 18 GB/s (measured, 16 cores). A parallel file system often has each file on another server. An object store
receives several shards of one slab concurrently (`zarr_slab.put`)."""


@dataclass(frozen=True)
class Share:
    """The chunks that one rank writes."""

    view: View
    table: Table
    sources: Sources

    @classmethod
    def whole(cls, view: View) -> Share:
        """Return a share of all chunks of the rank. Raises SnapshotError if the slot's table does not match its content."""
        table = table_of(view.header, view.table)
        return cls(view, table, Sources.whole(view.header.rank, table.image.chunks))

    @property
    def rank(self) -> int:
        return self.view.header.rank

    @property
    def nbytes(self) -> int:
        return len(self.sources.own) * self.table.image.stride_bytes

    def chunk(self, index: int) -> memoryview:
        return self.table.image.chunk(self.view.memory, index)

    def write(self, snapshot: Place, writer: Writer) -> None:
        """Write the slab, and then its manifest. Do nothing if the manifest exists: attempts of the same name have the same bytes. Raises
        as `writer` does."""
        if snapshot.there(paths.manifest_name(self.rank)):
            return
        slab, image, own = snapshot / paths.slab_name(self.rank), self.table.image, self.sources.own
        with slab.renewed():
            crcs = dict(zip(own, writer(slab, self.view, own), strict=True))
            slab.sync()
            manifest = RankManifest(
                attempt=snapshot.name,
                rank=self.rank,
                world=self.view.header.world,
                table=self.table,
                metadata_sha256=sha256(slab.read(zarr_slab.METADATA)).hexdigest(),
                fingerprints=tuple(f"{each:016x}" for each in self.view.fingerprints.tolist()),
                chunk_crc32c=tuple(crcs[i] if i in crcs else crc32c(self.chunk(i)) for i in range(image.chunks)),
                sources=self.sources,
            )
            self._prove()
        # After the block, because the block deletes the slab on an error. If this write fails, the manifest may exist and needs its slab.
        snapshot.write(paths.manifest_name(self.rank), manifest.to_json())

    def _prove(self) -> None:
        """Raise SnapshotError unless the bytes covered by the chunks' checksums have the tensors' fingerprints. So a later reader of a part
        of a tensor need not read all of it. (13 GB/s on one core; the checksums take 17 GB/s.)"""
        found = [0] * len(self.table.pieces)
        for index, held in self.table.by_chunk().items():
            chunk = self.chunk(index)
            for number, done, at, run in held:
                found[number] ^= fingerprint.of_part(chunk[at : at + run], done)
        for piece, word, taken in zip(self.table.pieces, found, self.view.fingerprints.tolist(), strict=True):
            if word != taken:
                raise SnapshotError(
                    f"tensor {piece.name!r} of rank {self.rank} has changed in memory since the snapshot was taken: its fingerprint was "
                    f"{taken:016x}, and is {word:016x}"
                )


def divide(views: Sequence[View]) -> list[Share]:
    """Return the ranks' shares. If several ranks have a chunk with the same bits, one of them writes it. The slots must not change
    meanwhile."""
    shares = [Share.whole(view) for view in views]
    dealt = shared_chunks.deal([share.table for share in shares], [view.fingerprints for view in views])
    for number, writers in enumerate(dealt):
        for chunk, writer in enumerate(writers):
            if writer != number and not _same(shares[number].chunk(chunk), shares[writer].chunk(chunk)):
                writers[chunk] = number
    placed = shared_chunks.placed([share.rank for share in shares], dealt)
    return [replace(share, sources=sources) for share, sources in zip(shares, placed, strict=True)]


def write(shares: Sequence[Share], snapshot: Place, writer: Writer) -> None:
    """Write all shares, a few at a time. After the first error, no further share is started. The error is raised once the running writes
    have ended, so that complete shares stay for the next try. Raises as `writer` does."""
    with ThreadPoolExecutor(min(AT_A_TIME[type(snapshot)], len(shares))) as threads:
        parts = [threads.submit(share.write, snapshot, writer) for share in shares]
        try:
            for part in as_completed(parts):
                part.result()
        finally:
            for part in parts:
                part.cancel()


def _same(one: memoryview, other: memoryview) -> bool:
    return np.array_equal(np.frombuffer(one, np.uint32), np.frombuffer(other, np.uint32))
