"""Which snapshots are copied into another node's memory, and what is done with them there. Pure.

`newest` says what leaves for the buddy, `admit` what the buddy does with it. What comes back is chosen for all nodes at once, by
`resilience/membership/buddy_sources.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ..arena.slot_header import Header, Stamp, State


def newest(headers_by_rank: Sequence[Sequence[Header]], world_local: int, last: Stamp | None) -> Stamp | None:
    """The snapshot to be copied next: the newest marked one that all ranks have sealed, if it is later than `last`. What it has overtaken
    is never copied. All nodes copy the same ones, or none of them would be of use: it takes one of the same step from each."""
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
    """For TAKE: which one of the row."""
    reason: str = ""
    """For NO."""


def admit(guests: Sequence[Sequence[Header]], row: int, rows: int, offered: Header) -> Admission:
    """Where a copy of `offered`, a sealed slot of local rank `row` of `rows`, goes among `guests`, by row.

    Never over the newest snapshot that all rows hold: with two slots a row, one complete copy stays while the next arrives, wherever a
    stream breaks. Generation and stamp fence: what is older than what has been here comes from a source whose time is over.
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
    """Which slot of a rank takes what is fetched, the best first: one that holds nothing, else the oldest."""
    return sorted(range(len(own)), key=lambda i: (own[i].whole, own[i].stamp))


def whole(guests: Sequence[Sequence[Header]]) -> set[Stamp]:
    """The snapshots that every row holds sealed: by its rank; or, of copies, by the keeper, each by itself, once it has come as it left."""
    held = [{header.stamp for header in headers if header.state is State.SEALED} for headers in guests]
    return set.intersection(*held) if held else set()


def _no(reason: str) -> Admission:
    return Admission(answer=Answer.NO, reason=reason)
