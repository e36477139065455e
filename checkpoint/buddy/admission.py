"""Decides which snapshots are copied into another node's memory, and what that node does with them. Pure.

`newest` chooses the snapshot to send to the buddy (the node that keeps the copy). `admit` decides whether the buddy accepts it.
`resilience/membership/buddy_sources.py` decides, for all nodes together, which copies are sent back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..arena.slot_header import Header, Stamp, State
from .protocol import Word


def newest(headers_by_rank: Sequence[Sequence[Header]], world_local: int, last: Stamp | None) -> Stamp | None:
    """Return the snapshot to copy next: the newest marked one that all ranks have sealed, if it is later than `last`. An older snapshot is
    skipped for good. All nodes copy the same snapshots, because a restore needs the same step from every node."""
    marked = {header.stamp for headers in headers_by_rank for header in headers if header.marked}
    stamp = max(whole(headers_by_rank[:world_local]) & marked, default=None)
    return stamp if stamp is not None and (last is None or stamp > last) else None


@dataclass(frozen=True, kw_only=True)
class Admission:
    answer: Word
    """TAKE, HAVE or NO."""
    slot: int = -1
    """For TAKE: the slot's index in the row (the slots for one rank's copies)."""
    reason: str = ""
    """For NO: why the copy is refused."""


def admit(guests: Sequence[Sequence[Header]], row: int, rows: int, offered: Header) -> Admission:
    """Return what to do with the copy that a source offers. offered: a sealed slot of local rank `row` of `rows`. guests: the slots for
    copies, by row.

    A copy never replaces the newest snapshot that all rows contain. So with two slots per row (a local rank of the source), one complete
    copy stays while the next arrives, even if the transfer breaks off. An offer with an older generation or stamp than a copy kept here is
    refused, because it comes from a process of the past.
    """
    if rows > len(guests):
        return _no(f"copies of {len(guests)} ranks can be kept here, and {rows} are offered")
    own = guests[row]
    known = [header for headers in guests[:rows] for header in headers]
    latest = max((header.generation for header in known), default=-1)
    if offered.generation < latest:
        return _no(f"generation {offered.generation} is over: copies of generation {latest} have come")
    others = {header.rank for header in own if header.generation == offered.generation} - {offered.rank}
    if others:
        return _no(
            f"a copy of rank {offered.rank} is offered, but its place here holds rank {min(others)} of the same generation"
        )
    sealed = {header.stamp for header in own if header.state is State.SEALED}
    if offered.stamp in sealed:
        return Admission(answer=Word.HAVE)
    if sealed and offered.stamp < max(sealed):
        return _no(f"step {offered.step} is too old: the copy of step {max(sealed).step} is here")
    kept = max(whole(guests[:rows]), default=None)
    free = [index for index, header in enumerate(own) if header.state is not State.SEALED or header.stamp != kept]
    if not free:
        return _no("every slot has a copy that must stay")
    return Admission(answer=Word.TAKE, slot=min(free, key=lambda i: (own[i].state is State.SEALED, own[i].stamp)))


def rooms(own: Sequence[Header]) -> list[int]:
    """Return the indexes of a rank's slots in the order in which to fill them with fetched copies: empty slots first, then the oldest."""
    return sorted(range(len(own)), key=lambda i: (own[i].whole, own[i].stamp))


def whole(guests: Sequence[Sequence[Header]]) -> set[Stamp]:
    """Return the snapshots that are sealed in every row. A rank seals its own slot. The buddy seals a copy once its bits have been
    verified."""
    held = [{header.stamp for header in headers if header.state is State.SEALED} for headers in guests]
    return set.intersection(*held) if held else set()


def _no(reason: str) -> Admission:
    return Admission(answer=Word.NO, reason=reason)
