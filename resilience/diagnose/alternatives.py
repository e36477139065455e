"""The explanations that a verdict rejected, and the evidence against each. Pure. The results are typed values; `report/explain.py` puts
them into words.

seen with the cause       a consequence: it came later, or the cause makes other ranks show it, and never the other way round
not seen at all           a flipped bit, but replicas agreed; the OOM killer, but the kernel counts no kill
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from ..detect.registry import Suspicion
from ..model.cause import Cause
from ..model.cluster_state import World
from ..model.incident import Because, Weighed
from ..model.node import NodeStatus
from ..model.types import Rank, Step
from .root_cause import TOGETHER_S, Verdict

_KILLED = -9
_NAMED = 64
"""Maximum number of ranks that are named. If more ranks did the same, no rank is named, because the store does not accept values of
megabytes."""


def against(verdict: Verdict, world: World) -> tuple[Weighed, ...]:
    """Return what else the cause might have been, and the evidence against it."""
    rivals = sorted(verdict.consequences, key=lambda s: (s.cause, _because(s, verdict)))
    found = [
        _grouped(list(alike), verdict) for _, alike in groupby(rivals, key=lambda s: (s.cause, _because(s, verdict)))
    ]
    found += agreement(world.statuses()) if verdict.cause is not Cause.FINGERPRINT_MISMATCH else []
    killed = [e for s in world.uncalm_statuses() for e in s.exits if e.code == _KILLED]
    if (
        verdict.cause is Cause.RANK_KILLED
        and killed
        and not any(e.out_of_memory or e.oom_killer_active for e in killed)
    ):
        found.append(Weighed(cause=Cause.MEMORY_SHORT, because=Because.NOT_COUNTED))
    return tuple(found)


def agreement(statuses: Sequence[NodeStatus]) -> list[Weighed]:
    """Return the evidence against a flipped bit: the newest step at which all nodes' replicas agreed. Empty: there is no such step, or no
    node compares anything."""
    if not any(s.compared for s in statuses):
        return []
    compared = [{*agreed} for agreed in {s.agreed_steps for s in statuses}]
    common = set.intersection(*compared) if compared else set()
    if not common:
        return []
    return [Weighed(cause=Cause.FINGERPRINT_MISMATCH, because=Because.AGREED, step=Step(max(common)))]


def _because(rival: Suspicion, verdict: Verdict) -> Because:
    if rival.cause is Cause.RANK_HUNG and verdict.cause is not Cause.RANK_HUNG:
        return Because.WAITS
    return Because.LATER if rival.at_s - verdict.at_s > TOGETHER_S or rival.cause is verdict.cause else Because.FOLLOWS


def _grouped(alike: Sequence[Suspicion], verdict: Verdict) -> Weighed:
    ranks = sorted({Rank(s.rank) for s in alike if s.rank is not None and s.rank >= 0})
    return Weighed(
        cause=alike[0].cause,
        because=_because(alike[0], verdict),
        ranks=tuple(ranks) if len(ranks) <= _NAMED else (),
        by_s=round(min(s.at_s for s in alike) - verdict.at_s, 3),
    )
