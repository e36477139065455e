"""What a person should look at although the job trains: conditions of the alerts, as far as a journal shows them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..model.incident import Incident
from ..plan.escalation import OBSERVE, STOP
from ..text import formatting
from . import explain
from .alert_rules import RUNBOOKS, STABLE_S, STORM


def unwritten(last: Mapping[str, Mapping[str, Any]]) -> str:
    """Return why the last snapshot could not be written to disk; empty: it was written, or none has been tried. last: as in `Seen`."""
    line, start = last.get("written", {}), last.get("start", {})
    failed = line and line["event"]["event"] == "failed" and line["at_s"] >= start.get("at_s", 0.0)
    return str(line["event"].get("reason", "")).rstrip(".") if failed else ""


def doubts(
    last: Mapping[str, Mapping[str, Any]], line: Mapping[str, Any], incidents: Mapping[str, Incident], now: float
) -> list[str]:
    """Return what a person should look at although the job trains. last: as in `Seen`. line: the newest `progress` line."""
    why = unwritten(last)
    found = [f"The last snapshot could not be written to disk: {why}."] if why else []
    found += _storm([i for i in incidents.values() if i.rung not in (OBSERVE, STOP) and i.at_s > now - 3600])
    step, at_s = line.get("snapshots", {}).get("certified", (-1, now))
    stable_s = now - (at_s if step >= 0 else last.get("start", {}).get("at_s", now))
    if stable_s > 2 * STABLE_S:  # the rule has held for as long as it must
        cost = f"the newest is that of step {step}" if step >= 0 else "there is none"
        found.append(
            f"No new stable snapshot for {formatting.duration(stable_s)} ({cost}): a fault that is found late would go back that far. "
            f"Not urgent; by day, read {RUNBOOKS}stable-snapshot-too-old.md."
        )
    answered = [(number, i) for number, i in incidents.items() if i.rung not in (OBSERVE, STOP) and not i.open][-1:]
    for number, incident in answered:
        if explain.result(incident) == "not cured":
            found.append(f"Look at the loss: incident {number} was not cured.")
    for number, incident in incidents.items():
        if incident.open and incident.rung == OBSERVE:
            found.append(f"Incident {number} lasts: {incident.summary}.")
    if line.get("quarantined"):
        found.append(f"Nodes in quarantine: {line['quarantined']}.")
    if line.get("spares") and not line["nodes"].get("stands by"):
        found.append("No spare is left: start another node.")
    return found


def _storm(recent: Sequence[Incident]) -> list[str]:
    """recent: the recoveries of the last hour."""
    if len(recent) <= STORM:
        return []
    node, count = max(
        Counter(node for i in recent for node in i.nodes).items(), key=lambda item: item[1], default=("", 0)
    )
    many = "all" if count == len(recent) else str(count)
    act = f"{many} of them began on {node}. Check that machine; mt-resilient drain {node} takes it out"
    alike = act if 2 * count > len(recent) else "see what they have in common: mt-resilient explain"
    return [f"Too many recoveries: {len(recent)} within an hour. {alike[0].upper()}{alike[1:]}."]
