"""What a snapshot on disk claims about itself. Pure: dataclasses ⇄ JSON, believed only when every field fits.

Trust runs down a chain of checksums: COMMIT → each rank's manifest → each chunk of its slab, so that no byte of a
snapshot can change, go missing or come from another attempt unnoticed.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from ..resilience.errors import FormatError, SnapshotError
from .sharing import Sources
from .tensors import Table, parse, strict

FORMAT = 3


@dataclass(frozen=True, kw_only=True)
class RankManifest:
    """One rank's part: written once its slab is on disk."""

    attempt: str
    rank: int
    world: int
    table: Table
    metadata_sha256: str
    """Of the slab's zarr.json."""
    fingerprints: tuple[str, ...]
    """Of each of the table's pieces, in hex, as it left its device (`fingerprint.py`)."""
    chunk_crc32c: tuple[int, ...]
    """Of each chunk of the payload as it lay in the arena; a shard's own can't tell one attempt from another."""
    sources: Sources
    """Which rank has written each chunk: of what several hold, one."""

    def words(self) -> NDArray[np.uint64]:
        """The fingerprints as numbers."""
        return np.array([int(each, 16) for each in self.fingerprints], np.uint64)

    def to_json(self) -> bytes:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return _dump({"format": FORMAT, **fields, "table": self.table.as_object(), "sources": self.sources.runs})

    @classmethod
    def from_json(cls, data: bytes) -> RankManifest:
        """Raises SnapshotError for anything that `to_json` can't have made, FormatError for what another version's may have."""
        where = "the rank manifest"
        found = dict(
            strict(
                _versioned(data, where),
                where,
                format=int,
                attempt=str,
                rank=int,
                world=int,
                table=object,
                metadata_sha256=str,
                fingerprints=list,
                chunk_crc32c=list,
                sources=list,
            )
        )
        del found["format"]
        table = Table.from_object(found.pop("table"))
        crcs, prints, runs = (found.pop(name) for name in ("chunk_crc32c", "fingerprints", "sources"))
        if len(crcs) != table.image.chunks or any(type(crc) is not int for crc in crcs):
            raise SnapshotError(f"{where} does not have one checksum a chunk")
        if len(prints) != len(table.pieces) or not all(
            type(each) is str and re.fullmatch("[0-9a-f]{16}", each) for each in prints
        ):
            raise SnapshotError(f"{where} does not have one fingerprint a tensor")
        if any(type(run) is not list or len(run) != 3 or any(type(each) is not int for each in run) for run in runs):
            raise SnapshotError(f"{where} does not say in whole numbers who has written its chunks")
        sources = Sources(found["rank"], tuple((n, rank, first) for n, rank, first in runs))
        sources.check(table.image.chunks, found["world"])
        return cls(**found, table=table, fingerprints=tuple(prints), chunk_crc32c=tuple(crcs), sources=sources)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A rank manifest, as COMMIT names it."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What retention and lists go by. Nothing else in a snapshot vouches for them, so they have a checksum."""

    written_s: float
    """Wall-clock seconds when it was committed."""
    bytes: int
    """Of all slabs and manifests."""

    def as_object(self) -> dict[str, object]:
        found = asdict(self)
        return {**found, "crc32c": crc32c(_dump(found))}

    @classmethod
    def from_object(cls, found: object) -> Figures:
        named = dict(strict(found, "the figures in COMMIT", written_s=float, bytes=int, crc32c=int))
        if crc32c(_dump({key: named[key] for key in ("written_s", "bytes")})) != named.pop("crc32c"):
            raise SnapshotError("the figures in COMMIT are damaged")
        return cls(**named)


@dataclass(frozen=True, kw_only=True)
class Commit:
    """The whole snapshot: it exists when this does."""

    attempt: str
    ranks: tuple[Entry, ...]
    """By global rank."""
    figures: Figures

    @property
    def world(self) -> int:
        return len(self.ranks)

    def to_json(self) -> bytes:
        return _dump({"format": FORMAT, **asdict(self), "figures": self.figures.as_object()})

    @classmethod
    def from_json(cls, data: bytes) -> Commit:
        """As `RankManifest.from_json`."""
        found = strict(_versioned(data, "COMMIT"), "COMMIT", format=int, attempt=str, ranks=list, figures=object)
        entries = [strict(entry, "a rank in COMMIT", bytes=int, sha256=str) for entry in found["ranks"]]
        if not entries or any(not re.fullmatch("[0-9a-f]{64}", entry["sha256"]) for entry in entries):
            raise SnapshotError("COMMIT names no ranks, or one without a checksum; it is damaged")
        figures = Figures.from_object(found["figures"])
        return cls(attempt=found["attempt"], ranks=tuple(Entry(**entry) for entry in entries), figures=figures)


def _dump(found: dict[str, object]) -> bytes:
    return json.dumps(found, separators=(",", ":")).encode()


def _versioned(data: bytes, where: str) -> object:
    found = parse(data, where)
    version = found.get("format") if isinstance(found, dict) else None
    if type(version) is not int or version < 1:
        raise SnapshotError(f"{where} does not say of which format it is; it is damaged")
    if version != FORMAT:
        raise FormatError(
            f"{where} is written in format {version}; this version of mt-resilient reads format {FORMAT}, and has left it as it is. Use "
            f"{'a newer version' if version > FORMAT else 'the version that wrote it'}, or name another snapshot"
        )
    return found
