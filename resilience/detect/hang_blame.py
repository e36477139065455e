"""Judges whether silent ranks hang, and which ranks hold up the others, from what the agents saw when they looked at each rank. Pure.

`hang_rules` judges each rank; this module compares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ..model.signals import OWN_WORK, DeviceState, Place, RankStall
from ..text import formatting
from . import flight_recorder
from .flight_recorder import Finding
from .hang_rules import WAITING

DEAD = DeviceState.DEAD


class Answer(Enum):
    NO = "no"
    SUSPECTED = "suspected"
    CERTAIN = "certain"


@dataclass(frozen=True, kw_only=True)
class Judgement:
    answer: Answer
    blamed: tuple[RankStall, ...] = ()
    """The ranks that hold up the others; empty: it is not known which ranks do."""
    reason: str = ""


def recorders(stalls: Sequence[RankStall]) -> Finding | None:
    """Return what the ranks' flight recorders show together; None: nothing."""
    return flight_recorder.judge({s.rank: s.calls for s in stalls if s.calls}, [s.rank for s in stalls])


def explained(stalls: Sequence[RankStall]) -> str:
    """Return a sentence about the cause, as devices or flight recorders show it; empty: only the stacks are known."""
    dead = sorted(s.rank for s in stalls if s.device is DEAD)
    if dead:
        which = "its device" if len(dead) == 1 else "their devices"
        return f"{formatting.ranks(dead)}: {which} finished nothing, not even on a stream that waits for no other work"
    found = recorders(stalls)
    return f"torch's flight recorder shows that {found.sentence}" if found else ""


def judge(stalls: Sequence[RankStall]) -> Judgement:
    """Return the judgement from the looks at all living ranks of the job."""
    if not stalls:
        return Judgement(answer=Answer.NO)
    blamed = blame(stalls)
    lively = [s for s in stalls if s.moved] or [s for s in blamed or stalls if s.busy]
    if lively:
        reason = "; ".join(f"rank {s.rank} is {s.words}: {s.why}" for s in lively[:3])
        return Judgement(answer=Answer.SUSPECTED, blamed=blamed, reason=reason)
    return Judgement(answer=Answer.CERTAIN, blamed=blamed, reason=_sentence(blamed, stalls))


def blame(stalls: Sequence[RankStall]) -> tuple[RankStall, ...]:
    """Return the ranks that hold up the others; empty: it is not known which ranks do. The suspects are the ranks at the lowest step. The
    first of these groups that is not empty is blamed: suspects that cannot run; the ranks that torch's flight recorders show, unless a rank
    outside this group works; ranks with a dead device, unless a rank outside this group works; suspects that wait neither for other ranks
    nor for their device; ranks that alone wait for their device; all suspects, if other ranks are ahead; the few ranks in another
    collective than most."""
    last = min(s.step for s in stalls)
    behind = [s for s in stalls if s.step == last]
    if found := tuple(s for s in behind if s.place is Place.HALTED):
        return found
    places = (*OWN_WORK, Place.TEARDOWN)
    followed = any(s.device for s in stalls)  # if not, a busy rank may just be polling its device
    working = [s for s in stalls if (s.busy or s.moved) and not s.device and (followed or s.place in places)]
    recorded = recorders(stalls)
    # The recorders' summaries contain no sends and receives. So a rank in a send or receive seems to be missing, but it waits for a rank
    # itself.
    shown = tuple(s for s in stalls if recorded and s.rank in recorded.ranks and s.place is not Place.EXCHANGE)
    for accused in (shown, tuple(s for s in stalls if s.device is DEAD)):
        if accused and all(s in accused for s in working):
            return accused
    if found := tuple(s for s in behind if s.place in places and not s.device):
        return found
    stuck = tuple(s for s in stalls if s.device)
    if stuck and all(s.place in WAITING for s in stalls if not s.device) and len(stuck) < len(stalls):
        return stuck
    if len(behind) < len(stalls):
        return tuple(behind)
    sites = [s.site for s in stalls if s.place is Place.COLLECTIVE]
    most = max(sites, key=sites.count, default="")
    if len(sites) == len(stalls) and 2 * sites.count(most) > len(sites):
        return tuple(s for s in stalls if s.site != most)
    return ()


def _sentence(blamed: Sequence[RankStall], stalls: Sequence[RankStall]) -> str:
    if not blamed and (known := explained(stalls)):
        return f"all {len(stalls)} ranks wait: {known}"
    if not blamed:
        return (
            f"all {len(stalls)} ranks wait, and none stands out: the cause may be the network, a device, or a rank whose stack "
            "does not show it"
        )
    who = ", ".join(str(s.rank) for s in blamed)
    return f"rank{'s' if len(blamed) > 1 else ''} {who} hang{'s' if len(blamed) == 1 else ''}"
