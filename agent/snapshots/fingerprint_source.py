"""Reads a snapshot's fingerprints (numbers computed from tensors' bits) from the slots in shared memory, or from the manifests on disk."""

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
    """Global ranks. The tuples below have one item for each of them, in the same order."""
    tables: tuple[bytes, ...]
    """The list of tensors in each rank's table, as JSON text. Equal layouts have equal text."""
    words: tuple[Words, ...]
    values: bytes = b""
    """The first rank's whole table, because it also contains the plain values."""
    everywhere: bool = True
    """True if all nodes compare this snapshot, because it goes to disk or into another node's memory."""


def seen(slots: Sequence[Sequence[Slot]], stamp: Stamp) -> Sight | None:
    """Return a snapshot's fingerprints from the slots of a node's ranks; None if one of the ranks no longer has the snapshot in a slot."""
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
    """Return a snapshot's fingerprints from its manifests on disk."""
    texts = (f',"pieces":{pieces_json(m.table.pieces)},"payload_bytes":{m.table.payload_bytes}}}' for m in manifests)
    return Sight(
        stamp=stamp,
        ranks=tuple(manifest.rank for manifest in manifests),
        tables=tuple(text.encode() for text in texts),
        words=tuple(manifest.words() for manifest in manifests),
    )


def layout_of(table: bytes) -> bytes:
    """Return the part of a JSON table that follows the plain values. JSON escapes quotes in text, so the pattern cannot occur inside a
    value."""
    return table[max(0, table.find(b',"pieces":[')) :]
