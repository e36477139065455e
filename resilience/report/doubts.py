"""What a person should look at although the job trains: conditions of the alerts, as far as a journal shows them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..model.incident import Incident
from ..model.types import NodeId
from ..plan.escalation import OBSERVE, STOP
from ..text import formatting
from . import explain
from .alert_rules import COPIED_S, RUNBOOKS, STABLE_S, STORM
from .needs import NOTHING, needs


def unwritten(last: Mapping[str, Mapping[str, Any]]) -> str:
    """Return why the last snapshot could not be written to disk; empty: it was written, or none has been tried. last: as in `Seen`."""
    line, start = last.get("written", {}), last.get("start", {})
    failed = line and line["event"]["event"] == "failed" and line["at_s"] >= start.get("at_s", 0.0)
    return str(line["event"].get("reason", "")).rstrip(".") if failed else ""


def doubts(
    last: Mapping[str, Mapping[str, Any]], line: Mapping[str, Any], incidents: Mapping[str, Incident], now: float
) -> list[str]:
    """Return what a person should look at although the job trains. last: as in `Seen`. line: the newest `progress` line."""
    why, trains = unwritten(last), line.get("nodes", {}).get("trains", 0)
    found = [f"The last snapshot could not be written to disk: {why}."] if why else []
    if line.get("etcd_s") is None:
        found.append(
            f"etcd does not answer: training goes on, but no fault can be answered. Read {RUNBOOKS}etcd-unreachable.md."
        )
    answered = [(number, i) for number, i in incidents.items() if i.rung not in (OBSERVE, STOP) and not i.open]
    uncured = [(n, i) for n, i in answered if explain.result(i) == "not cured"]
    for number, incident in uncured[-1:]:
        if number == answered[-1][0] or incident.at_s > now - 3600:
            found.append(f"Incident {number} was not cured: {_told(incident)}")
    found += _storm([i for _, i in answered if i.at_s > now - 3600], trains)
    for number, incident in incidents.items():
        if incident.open and incident.rung == OBSERVE:
            found.append(f"Incident {number} lasts: {_told(incident)}")
    found += _old(last, line, now)
    if line.get("quarantined"):
        found.append(
            f"Nodes in quarantine: {line['quarantined']}. Not urgent; by day, mt-resilient status names them: repair them, then "
            "mt-resilient readmit NODE."
        )
    if line.get("spares") and not line["nodes"].get("stands by"):
        found.append(
            "No spare is left: after the next lost node the job waits, or goes on with fewer. Not urgent; by day, start another node."
        )
    return found


def _told(incident: Incident) -> str:
    act = needs(incident).act
    return f"{incident.summary}." + (f" {act[0].upper()}{act[1:]}." if act != NOTHING else "")


def _old(last: Mapping[str, Mapping[str, Any]], line: Mapping[str, Any], now: float) -> list[str]:
    """Return of which snapshots the newest one is too old. Each time is that after which the alert is raised."""
    start, several = last.get("start", {}), line.get("nodes", {}).get("trains", 0) > 1
    copied = several and start.get("configuration", {}).get("copies.every_s") != 0
    rules = [
        ("certified", 2 * STABLE_S, "stable snapshot", "a fault that is found late", "stable-snapshot-too-old"),
        ("other node", 1.5 * COPIED_S, "copy on another node", "the loss of a node", "no-copy-on-another-node"),
    ]
    found = []
    for tier, limit_s, what, fault, page in rules if copied else rules[:1]:
        if tier not in line.get("snapshots", {}):
            continue
        step, at_s = line["snapshots"][tier]
        age_s = now - (at_s if step >= 0 else start.get("at_s", now))
        if age_s > limit_s:
            newest = f"the newest is that of step {step}" if step >= 0 else "there is none"
            found.append(
                f"No new {what} for {formatting.duration(age_s)} ({newest}): {fault} would go back that far. "
                f"Not urgent; by day, read {RUNBOOKS}{page}.md."
            )
    return found


def _storm(recent: Sequence[Incident], nodes: int) -> list[str]:
    """recent: the recoveries of the last hour. nodes: number of those that train."""
    if len(recent) <= STORM:
        return []
    [(cause, alike)] = Counter(i.cause for i in recent).most_common(1)
    [(node, began)] = Counter(node for i in recent for node in i.nodes).most_common(1) or [(NodeId(""), 0)]
    told = f"Too many recoveries: {len(recent)} within an hour, of which {alike} of the cause {cause.replace('_', ' ')}"
    if nodes > 1 and 2 * began > len(recent):
        return [f"{told}, and {began} began on {node}. Check that machine; mt-resilient drain {node} takes it out."]
    return [f"{told}. See what they have in common: mt-resilient explain; then read {RUNBOOKS}recovery-storm.md."]
