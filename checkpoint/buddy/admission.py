"""Which snapshots are copied into another node's memory, and what is done with them there. Pure.

`newest` chooses what goes to the buddy, the node that keeps the copy. `admit` chooses what the buddy does with it.
`resilience/membership/buddy_sources.py` chooses for all nodes at once what comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ..arena.slot_header import Header, Stamp, State


def newest(headers_by_rank: Sequence[Sequence[Header]], world_local: int, last: Stamp | None) -> Stamp | None:
    """Return the snapshot to copy next: the newest marked one that all ranks have sealed, if it is later than `last`. A snapshot that it
    has overtaken is never copied. All nodes copy the same snapshots, because only the same step from each of them is of use."""
    marked = {header.stamp for headers in headers_by_rank for header in headers if header.marked}
    stamp = max(whole(headers_by_rank[:world_local]) & marked, default=None)
    return stamp if stamp is not None and (last is None or stamp > last) else None


# -- the keeper's choice ------------------------------------------------------------------------------------------------------


class Answer(Enum):
    TAKE = "take"
    HAVE = "have"
    NO = "no"


@dataclass(frozen=True, kw_only=True)
class Admission:
    answer: Answer
    slot: int = -1
    """For TAKE: the slot's index in the row."""
    reason: str = ""
    """For NO."""


def admit(guests: Sequence[Sequence[Header]], row: int, rows: int, offered: Header) -> Admission:
    """Return what to do with a copy of `offered`, a sealed slot of local rank `row` of `rows`. guests: the slots for copies, by row.

    It never replaces the newest snapshot that all rows hold. So with two slots a row, one complete copy stays while the next arrives,
    wherever a stream breaks. Generation and stamp fence: an offer older than a copy that has been here comes from a source of the past.
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
        return _no(f"rank {offered.rank} is offered where rank {min(others)} of this generation is kept")
    sealed = {header.stamp for header in own if header.state is State.SEALED}
    if offered.stamp in sealed:
        return Admission(answer=Answer.HAVE)
    if sealed and offered.stamp < max(sealed):
        return _no(f"step {offered.step} was overtaken: step {max(sealed).step} is here")
    kept = max(whole(guests[:rows]), default=None)
    free = [index for index, header in enumerate(own) if header.state is not State.SEALED or header.stamp != kept]
    if not free:
        return _no("every slot holds what has to stay")
    return Admission(answer=Answer.TAKE, slot=min(free, key=lambda i: (own[i].state is State.SEALED, own[i].stamp)))


def rooms(own: Sequence[Header]) -> list[int]:
    """Return the order in which a rank's slots take what is fetched, best first: slots that hold nothing, then the oldest."""
    return sorted(range(len(own)), key=lambda i: (own[i].whole, own[i].stamp))


def whole(guests: Sequence[Sequence[Header]]) -> set[Stamp]:
    """Return the snapshots that every row holds sealed. A rank seals its own slot; the keeper seals each copy once it has arrived as it
    left."""
    held = [{header.stamp for header in headers if header.state is State.SEALED} for headers in guests]
    return set.intersection(*held) if held else set()


def _no(reason: str) -> Admission:
    return Admission(answer=Answer.NO, reason=reason)
