"""What a slot's header says, and what follows from the headers of many slots. Pure.

Data flows one way: a slot's first page → `Header` → three decisions. Which snapshots can a worker group go back to, which go to disk, and
which may be overwritten?
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import NamedTuple

from crc32c import crc32c

from ..format.shard_image import Image
from .memory_ring import REACH_STEPS, kept

STATE_OFFSET = 8
DRAINED_OFFSET = 16
DURABLE_OFFSET = 24
_MAGIC = b"MTSLOT04"
MOST_BYTES = 1 << 44
"""The largest payload of a rank, in bytes, that a header may claim."""
MARKS = 2
"""Number of slots for snapshots that are copied to another node: the last one that has arrived, and the one being copied."""


class State(IntEnum):
    FREE = 0
    STAGING = 1  # the writer is writing; or it died while writing, and the slot is torn
    STAGED = 2  # this rank's bytes are complete
    SEALED = 3  # every rank of the job had staged the step when this state was set
    LIVE = 4  # as SEALED, but only the processes that were alive then can go back to the step


class Stamp(NamedTuple):
    """Identifies one computation of one step: two stagings with the same stamp contain the same bits. Stamps are sorted by lineage, then by
    step."""

    generation: int
    rewinds: int
    step: int

    def left(self, to: int, life: tuple[int, int]) -> bool:
        """Return whether this step was discarded when the ranks went back to step `to`. life: generation and rewinds of the lineage that
        follows."""
        return self.step > to and self[:2] < life


@dataclass(frozen=True, kw_only=True)
class Header:
    """A slot's first page: the magic, then these fields, 8 bytes each, in this order, and a checksum of the fields that never change. The
    checksum detects a script that has written over the page."""

    state: State = State.FREE
    drained: bool = False
    """The slot's snapshot is on disk; this node has nothing more to do for its commit."""
    durable: bool = False
    """The slot's snapshot must be written to disk."""
    marked: bool = False
    """The slot's snapshot must be copied into another node's memory. All ranks mark the snapshot of the same step."""
    generation: int = -1
    rewinds: int = 0
    """How often this generation has rewound in place so far. The number of rewinds distinguishes two stagings of the same step."""
    step: int = -1
    rank: int = -1
    """Global rank."""
    world: int = 0
    table_bytes: int = 0
    pieces: int = 0
    """Number of tensors in the table. Each tensor has a fingerprint."""
    image_offset: int = 0
    """Offset of the image from the slot's start, in bytes: a multiple of the page size."""
    payload_bytes: int = 0

    @property
    def image(self) -> Image:
        return Image(self.payload_bytes)

    @property
    def end(self) -> int:
        """Offset of the image's end. The slot has allocated at least this many bytes of memory."""
        return self.image_offset + self.image.memory_bytes

    @property
    def whole(self) -> bool:
        """Whether this rank's part is complete."""
        return self.state in (State.STAGED, State.SEALED)

    @property
    def held(self) -> bool:
        """Whether this rank's part is complete, or complete only for the ranks alive now (LIVE). A LIVE part is lost when these ranks
        end."""
        return self.whole or self.state is State.LIVE

    @property
    def stamp(self) -> Stamp:
        return Stamp(self.generation, self.rewinds, self.step)

    def pack(self) -> bytes:
        numbers = [int(getattr(self, name)) for name in _FIELDS]
        return _LAYOUT.pack(_MAGIC, *numbers, crc32c(_FIXED.pack(*numbers[3:])))

    @classmethod
    def unpack(cls, page: bytes) -> Header:
        """Return the header in `page`. For a page that is unwritten, damaged, or from another version, return a header in state FREE."""
        magic, state, drained, durable, marked, *numbers, check = _LAYOUT.unpack_from(page)
        known = magic == _MAGIC and state in State._value2member_map_
        if not known or check != crc32c(_FIXED.pack(marked, *numbers)):
            return cls()
        rest = dict(zip(_FIELDS[4:], numbers, strict=True))
        flags = {"drained": bool(drained), "durable": bool(durable), "marked": bool(marked)}
        found = cls(state=State(state), **flags, **rest)
        return found if found.state is State.FREE or found.measured else cls()

    @property
    def measured(self) -> bool:
        """Whether a snapshot can have these sizes. `slot.py` checks whether they fit into the slot."""
        sizes = (self.table_bytes, self.pieces, self.image_offset)
        return min(sizes) >= 0 and max(sizes) <= MOST_BYTES and 0 < self.payload_bytes <= MOST_BYTES


_FIELDS = tuple(field.name for field in fields(Header))
_LAYOUT = struct.Struct(f"<8s{len(_FIELDS) + 1}q")
_FIXED = struct.Struct(f"<{len(_FIELDS) - 3}q")
"""Every field except `state`, `drained` and `durable`."""
HEADER_BYTES = _LAYOUT.size


def complete(headers_by_rank: Sequence[Sequence[Header]], world_local: int) -> set[Stamp]:
    """Return the snapshots that all `world_local` local ranks have complete and at least one of them has sealed.

    One seal is enough: a rank seals only after a consensus that every rank of the job has staged the step. A slot's header names the global
    rank that wrote it. The rank that reads the slot must check that this is its own number.
    """
    if world_local < 1 or len(headers_by_rank) < world_local:
        return set()
    local = headers_by_rank[:world_local]
    held = [{header.stamp for header in headers if header.whole} for headers in local]
    sealed = {header.stamp for headers in local for header in headers if header.state is State.SEALED}
    return sealed.intersection(*held)


def due(headers_by_rank: Sequence[Sequence[Header]], world_local: int, already: Collection[Stamp] = ()) -> Stamp | None:
    """Return the newest snapshot of `complete` that must go to disk, is not there yet, and is not in `already`."""
    local = [header for headers in headers_by_rank[:world_local] for header in headers if header.whole]
    wanted = {header.stamp for header in local if header.durable}
    lacking = {header.stamp for header in local if not header.drained}
    return max((complete(headers_by_rank, world_local) & wanted & lacking).difference(already), default=None)


def overwrite_order(headers: Sequence[Header], reach_steps: int = REACH_STEPS, *, hung: bool = False) -> list[int]:
    """Return the indexes of the slots that a new snapshot may overwrite, best first. Free and torn slots come first, then the oldest ones.
    Next come the slots that the ring keeps for their age (`memory_ring.kept`), and then the MARKS newest marked ones. A node that replaces
    a lost node brings a copy of one marked snapshot, and all ranks go back to that snapshot.

    Some slots are never overwritten: the newest sealed one; a later one that is staged and may still be sealed; the newest that only live
    ranks can go back to; and the newest that must go to disk, until it is there. Once it is there, an older one that is not on disk is not
    kept: another rank may have overwritten its part already, and then it is never due. If only these slots remain, the rank skips the new
    snapshot. A rank never skips a new snapshot in order to keep an older one for its age. hung: a reader of the slots, such as the write to
    disk, hangs. While a reader hangs, the slot that waits for the disk may be overwritten too, as the last choice.
    """
    sealed = max((header.stamp for header in headers if header.state is State.SEALED), default=None)
    certain = [header.stamp for header in headers if header.state in (State.SEALED, State.LIVE)]
    newest = max(certain, default=None)
    wanted = max(
        ((header.stamp, header.drained) for header in headers if header.whole and header.durable), default=None
    )
    waiting = None if wanted is None or wanted[1] else wanted[0]
    steps = [header.step for header in headers if header.held and newest is not None and header.stamp <= newest]
    marks = sorted({header.stamp for header in headers if header.whole and header.marked})[-MARKS:]
    ring = kept(steps, len(headers) - (MARKS if marks else 0), reach_steps)

    def may_go(header: Header) -> bool:
        older = newest is not None and header.stamp < newest and header.stamp != sealed
        return not header.held or (older and (hung or header.stamp != waiting))

    def worth(index: int) -> tuple[bool, bool, bool, bool, Stamp]:
        header = headers[index]
        return (
            header.held,
            header.whole and header.stamp == waiting,
            header.whole and header.stamp in marks,
            header.held and header.step in ring,
            header.stamp,
        )

    return sorted((index for index, header in enumerate(headers) if may_go(header)), key=worth)
