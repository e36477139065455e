"""Which copies of a snapshot go where, and from which one a rank's state comes. Pure.

A rank's state of one step can be in three tiers: its own node's arena, the buddy's (guest slots), and durable storage. Data goes
outwards: `newest` says what leaves for the buddy, `admit` what the buddy does with it. And back: `nearest` chooses, shard by shard.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum

from .header import Header, Stamp, State, complete


def newest(headers_by_rank: Sequence[Sequence[Header]], world_local: int, last: Stamp | None) -> Stamp | None:
    """The snapshot to be copied next: the newest complete one, if it is later than `last`. What it has overtaken is never copied."""
    stamp = max(complete(headers_by_rank, world_local), default=None)
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


def whole(guests: Sequence[Sequence[Header]]) -> set[Stamp]:
    """The snapshots that every row holds sealed. A copy is sealed by its keeper, each by itself, once it has arrived as it left."""
    held = [{header.stamp for header in headers if header.state is State.SEALED} for headers in guests]
    return set.intersection(*held) if held else set()


def _no(reason: str) -> Admission:
    return Admission(answer=Answer.NO, reason=reason)


# -- the way back -------------------------------------------------------------------------------------------------------------


class Tier(IntEnum):
    """Nearest first."""

    OWN = 0
    BUDDY = 1
    DURABLE = 2


Held = Mapping[Tier, Collection[Stamp] | None]
"""What each tier has of one rank; a tier that is left out has nothing, None: not yet known."""


class Known(Enum):
    YES = "yes"
    NO = "no"
    NOT_YET = "not yet known"


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where the state of each rank comes from."""

    known: Known
    stamp: Stamp | None = None
    """For YES; for NOT_YET the best so far, or None."""
    tiers: tuple[Tier, ...] = ()
    """By rank, where there is a stamp."""
    reason: str


def nearest(ranks: Sequence[Held]) -> Sources:
    """The newest snapshot that every rank can have, and for each rank the nearest tier that is known to hold it.

    NOT_YET while something that is not yet known could make a newer one the choice; a nearer tier alone is not waited for, since it
    would save seconds, and all tiers of one stamp hold the same bytes. Nothing is remembered: a copy that turns out not to verify is
    left out of what is held, and the question asked again; a tier that does not answer in time is left out as well.
    """
    held = [{stamp for stamps in rank.values() for stamp in stamps or ()} for rank in ranks]
    if not held:
        return Sources(known=Known.NO, reason="no rank is known")
    best = max(set.intersection(*held), default=None)
    waited_for = [number for number, rank in enumerate(ranks) if None in rank.values()]
    sure = [stamps for number, stamps in enumerate(held) if number not in waited_for]
    possible = [stamp for stamp in set.intersection(*sure) if best is None or stamp > best] if sure else []
    tiers = () if best is None else tuple(min(tier for tier, s in rank.items() if best in (s or ())) for rank in ranks)
    if waited_for and (possible or not sure):
        known, reason = Known.NOT_YET, f"what is kept of {_names(waited_for)} is not yet known"
    elif best is None:
        known, reason = Known.NO, "no snapshot is kept of all ranks"
    else:
        counts = {tier: tiers.count(tier) for tier in sorted(set(tiers))}
        where = ", ".join(f"{_WHERE[tier]} for {count}" for tier, count in counts.items())
        known, reason = Known.YES, f"step {best.step}: {where} of {len(ranks)} ranks"
    return Sources(known=known, stamp=best, tiers=tiers, reason=reason)


_WHERE = {Tier.OWN: "own memory", Tier.BUDDY: "the buddy's memory", Tier.DURABLE: "storage"}


def _names(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"rank {ranks[0]} and {len(ranks) - 1} more"
