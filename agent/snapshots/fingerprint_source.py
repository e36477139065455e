"""A snapshot's fingerprints as they lie: in the slots of memory, or in the manifests on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...checkpoint.arena.arena import Slot
from ...checkpoint.arena.slot_header import Stamp
from ...checkpoint.format.manifest import RankManifest
from ...checkpoint.format.replica_agreement import Words
from ...checkpoint.format.tensor_table import pieces_json


@dataclass(frozen=True, kw_only=True)
class Sight:
    """One snapshot's fingerprints."""

    stamp: Stamp
    ranks: tuple[int, ...]
    """Global, in the order of what follows."""
    tables: tuple[bytes, ...]
    """The pieces of each, as JSON: the same text for the same layout."""
    words: tuple[Words, ...]
    values: bytes = b""
    """A whole table, for the plain values in it."""
    everywhere: bool = True
    """It is a snapshot that all nodes look at: it goes to disk, or into another node's memory."""


def seen(slots: Sequence[Sequence[Slot]], stamp: Stamp) -> Sight | None:
    """What the slots of a node's ranks tell of a snapshot; None when one of the ranks does not hold it any more."""
    found = []
    for row in slots:
        slot = next((slot for slot in row if (h := slot.header()).whole and h.stamp == stamp), None)
        told = slot.words() if slot else None
        if told is None or told[0].stamp != stamp:
            return None
        found.append(told)
    return Sight(
        stamp=stamp,
        ranks=tuple(header.rank for header, _, _ in found),
        tables=tuple(layout_of(table) for _, table, _ in found),
        words=tuple(words for *_, words in found),
        values=found[0][1],
        everywhere=any(header.durable or header.marked for header, _, _ in found),
    )


def stored(stamp: Stamp, manifests: Sequence[RankManifest]) -> Sight:
    """What the manifests of a snapshot on disk tell."""
    texts = (f',"pieces":{pieces_json(m.table.pieces)},"payload_bytes":{m.table.payload_bytes}}}' for m in manifests)
    return Sight(
        stamp=stamp,
        ranks=tuple(manifest.rank for manifest in manifests),
        tables=tuple(text.encode() for text in texts),
        words=tuple(manifest.words() for manifest in manifests),
    )


def layout_of(table: bytes) -> bytes:
    """A table in JSON, from where the plain values end: in no text within JSON are these quotes bare."""
    return table[max(0, table.find(b',"pieces":[')) :]
