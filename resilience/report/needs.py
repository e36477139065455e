"""What a person needs to know of an incident first: the cause, whom it is blamed on, what it cost, and what to do. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ..model.cause import Cause
from ..model.incident import Incident
from ..model.signals import Repeated
from ..plan.escalation import OBSERVE, STOP
from ..text import formatting
from . import explain

NOTHING = "nothing"
_REPORTED: dict[str, str] = {
    Cause.STRAGGLER: "look at what else runs on that node; if it stays slow: `mt-resilient drain NODE`",
    Cause.MEMORY_SHORT: "give the machine more memory, or fewer ranks",
    Cause.DEVICE_SICK: "have somebody check that device; `mt-resilient drain NODE` takes the node out first",
    Cause.CUT_OFF: "check that node's network to etcd; its ranks continue meanwhile",
    Cause.FROZEN: "read the script: its optimizer no longer changes the parameters",
}
_STOPPED: dict[str, str] = {
    Cause.SCRIPT_RAISED: "read the traceback (`mt-resilient explain`) and correct the script or the data, and give the same command again",
    Cause.SNAPSHOT_UNUSABLE: "check which snapshots are good: `mt-resilient snapshots verify`",
    Cause.SNAPSHOT_UNREADABLE: "check that the storage of the snapshots answers, and give the same command again",
    Cause.FINGERPRINT_MISMATCH: "take that machine out of service, and give the same command again without it",
}


@dataclass(frozen=True, kw_only=True)
class Needs:
    cause: str
    blamed: str
    """Empty: nobody is known to be at fault."""
    cost: str
    act: str
    """`nothing`: a person need not act."""


def needs(incident: Incident) -> Needs:
    return Needs(
        cause=incident.cause.replace("_", " "), blamed=_blamed(incident), cost=_cost(incident), act=_act(incident)
    )


def told(incident: Incident, when: str, number: str) -> list[str]:
    """Return the lines that `explain` and the page show: what a person needs, then the evidence. Parameters: as for `explain.lines`."""
    first, *evidence = explain.lines(incident, when, number)
    found = needs(incident)
    rows = {
        "cause": found.cause,
        "blamed": found.blamed or "nobody is known to be",
        "cost": found.cost,
        "to do": found.act,
    }
    return [
        first,
        *(f"  {name:<10} {words}" for name, words in rows.items()),
        "  evidence:",
        *(f"  {line}" for line in evidence),
    ]


def _blamed(incident: Incident) -> str:
    ranks = formatting.ranks(incident.ranks) if incident.ranks else ""
    nodes = (
        f"node{'s' if len(incident.nodes) > 1 else ''} {formatting.listed(incident.nodes)}" if incident.nodes else ""
    )
    return " on ".join(filter(None, (ranks, nodes)))


def _cost(incident: Incident) -> str:
    took = sum(incident.phases_s.values())
    if incident.rung in (OBSERVE, STOP):
        return "nothing so far" if incident.rung == OBSERVE else "the job ended"
    known = f"{formatting.steps(incident.lost_steps)} computed again, {formatting.seconds(took)}"
    return f"not known yet: {known} so far" if incident.open else known


def _act(incident: Incident) -> str:
    result = explain.result(incident)
    if incident.rung == STOP:
        return _STOPPED.get(incident.cause, "correct the cause, and give the same command again")
    if incident.rung == OBSERVE:
        lasts = incident.open or incident.cause == Cause.DEVICE_SICK
        return _REPORTED.get(incident.cause, NOTHING) if lasts else NOTHING
    if incident.open:
        return "nothing yet: the job recovers by itself"
    if result == "not cured":
        known = incident.resume_step is not None and incident.resume_step >= 0
        step = incident.resume_step if known else "STEP"
        return (
            "look at the curve of the loss. If it is as expected, as with other data, do nothing. If it is bad, `mt-resilient pause` "
            f"keeps the snapshots while you look for the cause. `mt-resilient rewind --to {step}` goes back to before the fault; "
            "with `--skip N`, the ranks also skip the next N batches"
        )
    if incident.repeated is Repeated.OTHER:
        return "see why the same steps gave another loss: docs/guarantees.md, The same bits"
    return NOTHING
