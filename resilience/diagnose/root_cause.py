"""From suspicions to the verdict: which of several suspicions is the cause, and which are its consequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..detect.registry import Suspicion
from ..model.cause import Cause
from ..model.types import NodeId, Step
from ..text import formatting

_WEIGHT = {
    Cause.FINGERPRINT_MISMATCH: -1,
    Cause.SNAPSHOT_UNUSABLE: 0,
    Cause.SNAPSHOT_UNREADABLE: 0,
    Cause.STATE_REFUSED: 0,
    Cause.STATE_UNSAVABLE: 0,
    Cause.TORCH_MISSING: 0,
    Cause.NON_FINITE: 0,
    Cause.LOSS_SPIKE: 0,
    Cause.GRADIENT_SPIKE: 0,
    Cause.LOSS_DIVERGENCE: 0,
    Cause.AGENT_RESTARTED: 1,
    Cause.AGENT_LOST: 1,
    Cause.RANK_KILLED: 2,
    Cause.SCRIPT_RAISED: 3,
    Cause.RANK_HUNG: 4,
    Cause.FROZEN: 5,
    Cause.ORDERED: 5,
    Cause.MOVED: 5,
    Cause.STRAGGLER: 5,
    Cause.CUT_OFF: 5,
    Cause.DEVICE_SICK: 5,
    Cause.MEMORY_SHORT: 5,
}
"""Of several suspicions within `TOGETHER_S`, that with the smallest weight is the cause. A killed rank makes its peers raise exceptions,
never the other way round. A wrong replica may be the reason why a step gives NaN."""

TOGETHER_S = 1.0
"""Suspicions that are at most this many seconds apart count as simultaneous. Gloo and NCCL report a dead rank to its peers within
milliseconds, and the agent sees all their exits in one or two ticks of its loop."""

HEARD_S = 1.0
"""All nodes have reported how their ranks ended within this many seconds of a fault, because agents report this immediately."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    cause: Cause
    blamed: tuple[Suspicion, ...]
    """The suspicions of the cause itself."""
    consequences: tuple[Suspicion, ...]
    at_s: float

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """The nodes that the fault struck; none if ranks hang and no rank is blamed. Nodes of ranks with the same error as the first rank
        are included."""
        same = [s for s in self.consequences if self.cause is Cause.SCRIPT_RAISED and s.signature == self.signature]
        here = (s.node for s in (*self.blamed, *same) if s.cause is not Cause.RANK_HUNG or s.rank is not None)
        return tuple(dict.fromkeys(here))

    @property
    def early(self) -> set[NodeId]:
        """The nodes that the fault struck before the blamed rank had finished a step."""
        return {s.node for s in self.blamed if not s.started}

    @property
    def started(self) -> bool:
        """Whether a blamed rank had finished a step in this generation."""
        return any(s.started for s in self.blamed)

    @property
    def through(self) -> bool:
        """Whether the training loops of all blamed ranks were over."""
        return all(s.through for s in self.blamed)

    @property
    def broken(self) -> bool:
        """Whether the script cannot be run at all."""
        return any(s.broken for s in self.blamed)

    @property
    def onset(self) -> Step:
        """First step whose state is known to be wrong; -1: no state is. The onsets of consequences are included."""
        return min((s.onset for s in (*self.blamed, *self.consequences) if s.onset >= 0), default=Step(-1))

    @property
    def signature(self) -> str:
        return self.blamed[0].signature

    @property
    def advice(self) -> str:
        return next((suspicion.advice for suspicion in self.blamed), "")

    def describe(self) -> str:
        return "; ".join(
            formatting.few([*dict.fromkeys(s.evidence for s in self.blamed)])
        )  # all ranks report the same NaN


def judge(suspicions: Sequence[Suspicion]) -> Verdict | None:
    """Return the verdict, or None if nothing is suspected."""
    if not suspicions:
        return None
    # Ranks that wait for a lost rank hang too, and their last sign of life may be older than the loss.
    sudden = [s for s in suspicions if s.cause is not Cause.RANK_HUNG]
    first = min(s.at_s for s in sudden or suspicions)
    together = [s for s in sudden if s.at_s - first <= TOGETHER_S] or list(suspicions)
    cause = min(together, key=lambda s: (_WEIGHT[s.cause], s.at_s)).cause
    blamed = tuple(s for s in together if s.cause is cause)
    known = {*map(id, blamed)}
    rest = tuple(s for s in suspicions if id(s) not in known)
    if cause is Cause.SCRIPT_RAISED:  # every peer of a rank that raised raises too: the first rank is the cause
        rest, blamed = (*blamed[1:], *rest), blamed[:1]
    return Verdict(cause=cause, blamed=blamed, consequences=rest, at_s=first)


def settled(verdict: Verdict, unheard: bool, now: float) -> bool:
    """Whether the controller may act on the verdict. An exception may be the consequence of a fault on another node that has not reported
    it yet. (The leader's own node reports without delay.) unheard: a member has not reported how its ranks ended; now: wall-clock
    seconds."""
    return verdict.cause is not Cause.SCRIPT_RAISED or not unheard or abs(now - verdict.at_s) >= HEARD_S
