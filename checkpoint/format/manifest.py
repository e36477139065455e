"""The files in which a snapshot on disk describes itself. Pure: dataclasses ⇄ JSON, accepted only if every field is valid.

A chain of checksums leads from COMMIT to each rank's manifest, and from there to each chunk of its slab. So if any byte of a snapshot
changes, is missing or comes from another attempt, a reader detects it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from crc32c import crc32c
from msgspec import Meta, Struct, to_builtins
from numpy.typing import NDArray

from ...resilience.errors import FormatError, SnapshotError
from .schema import Sha256, Size, Word, checked, parse
from .shared_chunks import Sources
from .tensor_table import Table, TableForm

FORMAT = 3
MOST_RANKS = 100_000
MANIFEST_BYTES = 1 << 30
"""The most bytes of one rank's manifest."""
AttemptName = Annotated[str, Meta(pattern=r"\A[0-9a-g-]{1,255}\Z")]


@dataclass(frozen=True, kw_only=True)
class RankManifest:
    """Describes one rank's part of a snapshot. The manifest is written once the rank's slab is on disk."""

    attempt: str
    rank: int
    world: int
    table: Table
    metadata_sha256: str
    """SHA-256 of the slab's zarr.json."""
    fingerprints: tuple[str, ...]
    """The fingerprint of each of the table's pieces, in hex, computed on its device (`fingerprint.py`)."""
    chunk_crc32c: tuple[int, ...]
    """The checksum of each chunk of the payload, as it was in the arena. A shard's own checksums cannot distinguish attempts."""
    sources: Sources
    """For each chunk, the rank that has written it. If several ranks hold the same chunk, only one writes it."""

    def words(self) -> NDArray[np.uint64]:
        """Return the fingerprints as numbers."""
        return np.array([int(each, 16) for each in self.fingerprints], np.uint64)

    def to_json(self) -> bytes:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return _dump({"format": FORMAT, **fields, "table": self.table.as_object(), "sources": self.sources.runs})

    @classmethod
    def from_json(cls, data: bytes) -> RankManifest:
        """Return the manifest. Raises SnapshotError for data that `to_json` cannot have written, FormatError for data of another
        version."""
        where = "the rank manifest"
        form = checked(_versioned(data, where), _ManifestForm, where)
        table = Table.of_form(form.table)
        if len(form.chunk_crc32c) != table.image.chunks:
            raise SnapshotError(f"{where} does not have one checksum for each chunk")
        if len(form.fingerprints) != len(table.pieces):
            raise SnapshotError(f"{where} does not have one fingerprint for each tensor")
        sources = Sources(form.rank, form.sources)
        sources.check(table.image.chunks, form.world)
        fields = {name: getattr(form, name) for name in cls.__dataclass_fields__}
        return cls(**fields | {"table": table, "sources": sources})


class Entry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank manifest's size and hash, as COMMIT lists them."""

    bytes: Annotated[int, Meta(ge=0, le=MANIFEST_BYTES)]
    sha256: Sha256


class Figures(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The figures that retention and lists use. No other checksum in a snapshot covers them, so they have their own."""

    written_s: Annotated[float, Meta(ge=0, le=1 << 37)]
    """Wall-clock seconds at the commit; at most the year 6325, so that it can be shown as a date."""
    bytes: Size
    """Total bytes of all slabs and manifests."""
    crc32c: Word

    @classmethod
    def of(cls, written_s: float, nbytes: int) -> Figures:
        checksum = crc32c(_dump({"written_s": written_s, "bytes": nbytes}))
        return cls(written_s=written_s, bytes=nbytes, crc32c=checksum)


class Commit(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of COMMIT. The snapshot exists if this file exists."""

    format: int = FORMAT
    attempt: AttemptName
    ranks: Annotated[tuple[Entry, ...], Meta(min_length=1, max_length=MOST_RANKS)]
    """The manifests by global rank."""
    figures: Figures

    @property
    def world(self) -> int:
        return len(self.ranks)

    def to_json(self) -> bytes:
        return _dump(to_builtins(self))

    @classmethod
    def from_json(cls, data: bytes) -> Commit:
        """Return the commit. Raises as `RankManifest.from_json` does."""
        found = checked(_versioned(data, "COMMIT"), cls, "COMMIT")
        if found.figures != Figures.of(found.figures.written_s, found.figures.bytes):
            raise SnapshotError("the figures in COMMIT are damaged")
        return found


class _ManifestForm(Struct, forbid_unknown_fields=True):
    format: int
    attempt: AttemptName
    rank: Size
    world: Annotated[int, Meta(ge=1, le=MOST_RANKS)]
    table: TableForm
    metadata_sha256: Sha256
    fingerprints: tuple[Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")], ...]
    chunk_crc32c: tuple[Word, ...]
    sources: tuple[tuple[Size, Size, Size], ...]


def _dump(found: dict[str, object]) -> bytes:
    return json.dumps(found, separators=(",", ":")).encode()


def _versioned(data: bytes, where: str) -> object:
    found = parse(data, where)
    version = found.get("format") if isinstance(found, dict) else None
    if type(version) is not int or version < 1:
        raise SnapshotError(f"{where} does not name its format version. It is damaged")
    if version != FORMAT:
        raise FormatError(
            f"{where} is written in format {version}; this version of mt-resilient reads format {FORMAT}. The file is unchanged. Use "
            f"{'a newer version' if version > FORMAT else 'the version that wrote it'}, or name another snapshot"
        )
    return found
