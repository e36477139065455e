"""The reasons why a person should look at a job although it trains: the conditions of the alerts, as far as a journal shows them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..model.cause import Cause
from ..model.incident import Incident
from ..model.types import NodeId
from ..plan.escalation import OBSERVE, STOP
from ..text import formatting
from . import explain
from .alert_rules import COPIED_S, HELPED_NOT, PLANNED, RUNBOOKS, STABLE_S, STORM
from .needs import NOTHING, needs
from .overview import LOSSES


@dataclass(frozen=True)
class Doubt:
    urgent: bool
    """Whether a person should act now, not only by day, as the severity of the alert says."""
    what: str
    """A clause that follows "Training, but"."""
    act: str


def unwritten(last: Mapping[str, Mapping[str, Any]]) -> str:
    """Return why the last snapshot could not be written to disk; empty: it was written, or none has been tried. last: as in `Seen`."""
    line, start = last.get("written", {}), last.get("start", {})
    failed = line and line["event"]["event"] == "failed" and line["at_s"] >= start.get("at_s", 0.0)
    return str(line["event"].get("reason", "")).rstrip(".") if failed else ""


def doubts(
    last: Mapping[str, Mapping[str, Any]], line: Mapping[str, Any], incidents: Mapping[str, Incident], now: float
) -> list[Doubt]:
    """Return the reasons why a person should look at the job although it trains, the most urgent first. last: as in `Seen`. line: the
    newest `progress` line."""
    found: list[Doubt] = []
    if line.get("etcd_s") is None:
        page = f"Training continues meanwhile. The runbook: {RUNBOOKS}etcd-unreachable.md."
        found.append(Doubt(True, "etcd does not answer, so no dead or hung rank is restarted", page))
    answered = [(number, i) for number, i in incidents.items() if i.rung not in (OBSERVE, STOP) and not i.open]
    acted_s = max((i.at_s for _, i in answered if i.cause == Cause.ORDERED), default=0.0)
    uncured = [(n, i) for n, i in answered if explain.result(i) == "not cured" and i.at_s > acted_s]
    for number, incident in uncured[-1:]:
        if number == answered[-1][0] or incident.at_s > now - 3600:
            found.append(Doubt(True, incident.summary, f"Incident {number} was not cured. {_act(incident)}".strip()))
    recovered = [i for _, i in answered if i.cause not in PLANNED and explain.result(i) not in HELPED_NOT]
    found += _storm([i for i in recovered if i.at_s > now - 3600], line.get("nodes", {}).get("trains", 0))
    for number, incident in incidents.items():
        if incident.open and incident.rung == OBSERVE and (_act(incident) or incident.would is not None):
            lasts = f"Incident {number} lasts, and is only reported. {_act(incident)}".strip()
            found.append(Doubt(incident.cause == Cause.FROZEN, incident.summary, lasts))
    if why := unwritten(last):
        act = f"Make room, or mend the storage ({why}). The program tries again by itself."
        if steps := line.get("at_risk", {}).get(LOSSES[-1]):
            what = "all nodes were" if line.get("nodes", {}).get("trains", 0) > 1 else "this machine was"
            act += f" If {what} lost now, {formatting.steps(steps)} would be computed again."
        found.append(Doubt(False, "the last snapshot could not be written to disk", act))
    found += _old(last, line, now)
    if line.get("quarantined"):
        nodes = formatting.count(line["quarantined"], "node is", "nodes are")
        repair = "`mt-resilient status` names them. After the repair: `mt-resilient readmit NODE`."
        found.append(Doubt(False, f"{nodes} in quarantine", repair))
    if line.get("spares") and not line["nodes"].get("stands by"):
        found.append(
            Doubt(
                False,
                "no spare is left",
                "After the next lost node the job waits, or continues with fewer nodes. Start another node.",
            )
        )
    return sorted(found, key=lambda each: not each.urgent)


def _act(incident: Incident) -> str:
    act = needs(incident).act
    return formatting.sentence(act) if act != NOTHING else ""


_STABLE = "A snapshot is stable once its replicas agreed and the steps after it were clean. "


def _old(last: Mapping[str, Mapping[str, Any]], line: Mapping[str, Any], now: float) -> list[Doubt]:
    """Return the kinds of snapshots of which the newest one is too old. The limit for each kind is the age at which the alert is raised."""
    start, several = last.get("start", {}), line.get("nodes", {}).get("trains", 0) > 1
    copied = several and start.get("configuration", {}).get("copies.every_s") != 0
    rules = [
        (
            "certified",
            2 * STABLE_S,
            "stable snapshot",
            "a fault that is found late",
            "stable-snapshot-too-old",
        ),
        ("other node", 1.5 * COPIED_S, "copy on another node", "the loss of a node", "no-copy-on-another-node"),
    ]
    found = []
    for tier, limit_s, what, fault, page in rules if copied else rules[:1]:
        if tier not in line.get("snapshots", {}):
            continue
        step, at_s = line["snapshots"][tier]
        age_s = now - (at_s if step >= 0 else start.get("at_s", now))
        if age_s > limit_s:
            back = max(0, line.get("step", 0) - max(0, step))
            cost = formatting.steps(back)
            cost += f", about {formatting.duration(back * line['step_s'])}" if line.get("step_s") else ""
            newest = f"would go back to step {step}" if step >= 0 else "would go back to the beginning"
            act = f"{_STABLE * (tier == 'certified')}Now, {fault} {newest} and cost {cost}. The runbook: {RUNBOOKS}{page}.md."
            found.append(Doubt(False, f"no new {what} for {formatting.duration(age_s)}", act))
    return found


def _storm(recent: Sequence[Incident], nodes: int) -> list[Doubt]:
    """recent: the recoveries of the last hour. nodes: number of nodes that train."""
    if len(recent) <= STORM:
        return []
    [(cause, alike)] = Counter(i.cause for i in recent).most_common(1)
    [(node, began)] = Counter(node for i in recent for node in i.nodes).most_common(1) or [(NodeId(""), 0)]
    of = "all" if alike == len(recent) else f"{alike} of them"
    told = f"it recovered {len(recent)} times within an hour, {of} from {cause.replace('_', ' ')}"
    if nodes > 1 and 2 * began > len(recent):
        return [
            Doubt(True, f"{told}, {began} on {node}", f"Check that machine; `mt-resilient drain {node}` takes it out.")
        ]
    return [
        Doubt(
            True,
            told,
            f"See what they have in common: `mt-resilient explain`. The runbook: {RUNBOOKS}recovery-storm.md.",
        )
    ]
