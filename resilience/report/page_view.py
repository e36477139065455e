"""From what the journals say to what the page shows: the sentence of state, what to do, costs, curve and incidents. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..model.incident import PHASES, Incident, turns
from ..model.rewind import left_out
from ..plan.escalation import OBSERVE, STOP
from ..text import formatting
from ..text.formatting import printable
from . import explain
from .doubts import doubts
from .needs import needs, told
from .overview import LOSSES, TIERS, Overview, State
from .time_ledger import TRAINING, WHERE, effective

POINTS = 1500
"""The most points of a curve that are sent; of more, every n-th."""
SILENT_S = 200.0
"""Seconds after which a leader's `progress` line is missing: it writes one at least every minute."""
STILL_S, START_S = 600.0, 1800.0
"""Seconds without a step, and without the first step of a start, after which a person should look."""
NO_AGENT = "no agent ran"
_QUIET = {
    0: "in order",
    129: "by SIGHUP",
    130: "by Ctrl-C",
    131: "by SIGQUIT",
    138: "by its scheduler's SIGUSR1",
    140: "by its scheduler's SIGUSR2",
    143: "by SIGTERM, a preemption",
    152: "by its scheduler's SIGXCPU",
}
_AGAIN = "Give the same command again: it continues from the newest snapshot on disk"


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What is known of a job, from outside."""

    finished: bool
    alive: bool
    """Whether an agent runs in the run directory."""
    gone: bool = False
    """Whether it was killed on this machine."""
    stepped_s: float = math.inf
    """When the ranks had last made a step, or had a reason for making none."""
    launched: bool = False
    """Whether agents were started from here with a hostfile."""
    last: Mapping[str, Mapping[str, Any]]
    """The newest line of each kind (`RunReader.last`)."""
    incidents: Mapping[str, Incident]


def state(seen: Seen, now: float) -> dict[str, str]:
    """Return the sentence of state. mood: good, info, warn or bad; act: what a person should do now."""
    line, start = seen.last.get("progress", {}), seen.last.get("start", {})
    at = _step(line) if line.get("step", -1) >= 0 else "its first step"
    ago_s = abs(now - max(line.get("at_s", 0.0), start.get("at_s", 0.0)))  # the clock of another machine may be ahead
    here = " here" if start.get("several") and not seen.launched else ""
    again = f"Does it go on elsewhere? mt-resilient status. If not: {_AGAIN}." if here else f"{_AGAIN}."
    code = _ended(seen)
    if seen.finished:
        return _said("good", f"Finished after {at}" if line.get("step", -1) >= 0 else "Finished", "Nothing to do.")
    if code is not None:
        quiet = code in _QUIET
        how = f"ended {_QUIET[code]}" if quiet else f"has stopped with exit code {code}"
        words = f"Not training{here}: the {'agent' if here else 'job'} {how} after {at}"
        bad = seen.last.get("bad")
        if quiet or not bad:
            return _said("info" if quiet else "bad", words, again)
        why = str(bad["sentence"]).removeprefix("stopped: ").partition(". Everything is kept")[0].rstrip(".")
        stopped = [i for i in seen.incidents.values() if i.at_s >= start.get("at_s", 0.0)][-1:]
        if not stopped or stopped[0].rung != STOP:
            return _said("bad", words, f"Why: {why}. Correct that. {_AGAIN}.")
        act, first = needs(stopped[0]).act, "" if stopped[0].summary in why else f"{stopped[0].summary}; "
        return _said("bad", words, f"Why: {first}{why}. {act[0].upper()}{act[1:]}.")
    if seen.gone or (not seen.alive and ago_s > SILENT_S and (line or not (here or seen.launched))):
        return _said("bad", f"Not training{here}: its agent is gone without a word since {at}", again)
    if not line and (here or seen.launched):
        elsewhere = "Look into the run directory of that node: mt-resilient status names it."
        return _said("info", "Not known: the node that leads the job has its course in its own journal", elsewhere)
    if ago_s > SILENT_S:
        return _said(
            "warn", f"Silent: the last word is {formatting.duration(ago_s)} old, from {at}", "Ask: mt-resilient status."
        )
    if not line:
        return _said("info", "Starting: no agent that leads has written a line yet", "Nothing to do.")
    return _running(seen, State(line["state"]), at, line, now)


def _step(line: Mapping[str, Any]) -> str:
    return f"step {line['step']}{f' of {total}' if (total := line.get('total')) else ''}"


def figures(line: Mapping[str, Any], up_s: float | None) -> list[str]:
    """Return the step, the pace, the loss and how long the agent has run, as far as they are known. line: of the kind `progress`."""
    found = [_step(line)] if line.get("step", -1) >= 0 else []
    found += [f"{formatting.duration(line['step_s'])} a step"] if line.get("step_s") else []
    found += [f"loss {line['loss']:g}"] if line.get("loss") is not None else []
    return found + ([f"up {formatting.duration(up_s)}"] if up_s is not None else [])


def present_line(line: Mapping[str, Any], told: Overview, now: float) -> dict[str, Any]:
    """Return the newest `progress` line with what etcd says now in place of what the journal said then."""
    before = line.get("snapshots", {})
    kept = {
        tier: (step, before[tier][1] if tier in before and before[tier][0] == step else now)
        for tier, step in told.snapshots.items()
    }
    return {**line, **asdict(told), "snapshots": kept, "at_s": now}


def _running(seen: Seen, doing: State, at: str, line: Mapping[str, Any], now: float) -> dict[str, str]:
    under_way = [i for i in seen.incidents.values() if i.open and OBSERVE < i.rung < STOP]
    still_s = line["at_s"] - seen.stepped_s
    if doing in (State.TRAINING, State.RECOVERING, State.STARTING) and still_s > (
        START_S if doing is State.STARTING else max(STILL_S, 20 * line.get("step_s", 0.0))
    ):
        unwatched = "" if line.get("step", -1) >= 0 else " A script without a loop that is watched reports no steps."
        words = f"No step for {formatting.duration(still_s)}, at {at}; the agent says: {doing}"
        return _said("warn", words, f"Read mt-resilient explain, and the stacks in logs/stacks-*.txt.{unwatched}")
    match doing:
        case State.RECOVERING:
            why = "".join(f" for {formatting.duration(now - i.at_s)}: {i.summary}" for i in under_way[-1:])
            at_it = "Nothing to do yet: the program is at it. It takes seconds to minutes."
            return _said("warn", f"Not training yet, recovering{why}", at_it)
        case State.WAITING:
            since = "".join(f" for {formatting.duration(now - i.at_s)}" for i in under_way[-1:])
            lost = "".join(f" Lost: {formatting.listed(i.nodes)}." for i in under_way[-1:] if i.nodes)
            missing = f"Start the missing nodes, or others: mt-resilient status says how many.{lost}"
            return _said("bad", f"Not training: waiting for nodes{since}, at {at}", missing)
        case State.PAUSED:
            return _said("info", f"Paused at {at}, as ordered", "To continue: mt-resilient resume.")
        case State.STARTING:
            return _said("info", "Starting: the ranks have reported no step yet", "Nothing to do.")
        case State.ENDED:
            return _said("info", f"Ending, at {at}", "Nothing to do.")
    pace = f", {formatting.duration(line['step_s'])} a step" if line.get("step_s") else ""
    found = doubts(seen.last, line, seen.incidents, now)
    return _said("warn" if found else "good", f"Training: {at}{pace}", " ".join(found) or "Nothing to do.")


def last_incident(incidents: Mapping[str, Incident]) -> dict[str, Any] | None:
    """Return the row of the newest incident that was answered; None: there is none."""
    answered = [(number, i) for number, i in incidents.items() if i.rung != OBSERVE]
    return row(*answered[-1]) if answered else None


def _ended(seen: Seen) -> int | None:
    """Return the exit code with which the last agent here ended; None: it runs, or ended without a word."""
    end, start = seen.last.get("end"), seen.last.get("start", {"at_s": 0.0})
    return int(end["code"]) if end and not seen.alive and end["at_s"] >= start["at_s"] else None


def _said(mood: str, words: str, act: str) -> dict[str, str]:
    return {"mood": mood, "words": printable(words), "act": printable(act)}


def costs(lives: Sequence[Mapping[str, Any]], incidents: Mapping[str, Incident]) -> dict[str, Any]:
    """Return where the time went, in seconds, over all starts of agents (lives, in order of time); and how many incidents were
    answered, at what cost."""
    spent = dict.fromkeys((*WHERE, NO_AGENT), 0.0)
    reached_s = lives[0]["from_s"] if lives else 0.0
    for life in lives:
        for where, seconds in life["spent"].items():
            spent[where] = spent.get(where, 0.0) + seconds
        spent[NO_AGENT] += max(0.0, life["from_s"] - reached_s)
        reached_s = max(reached_s, life["until_s"])
    answered = [i for i in incidents.values() if i.rung != OBSERVE]
    return {
        "effective": effective(spent),
        "spent": {where: round(seconds, 3) for where, seconds in spent.items() if seconds},
        "trained_s": spent[TRAINING],
        "incidents": len(incidents),
        "answered": len(answered),
        "lost_steps": sum(i.lost_steps for i in incidents.values()),
        "lost_s": round(sum(sum(i.phases_s.values()) for i in incidents.values()), 3),
    }


def present(line: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Return what would be lost now, the newest snapshots with their age, the nodes, and etcd."""
    step_s = line.get("step_s", 0.0)
    kept = {tier: line.get("snapshots", {}).get(tier, (-1, 0.0)) for tier in TIERS}
    return {
        "at_risk": [
            {"lost": loss, "steps": steps, "seconds": formatting.duration(steps * step_s) if step_s and steps else ""}
            for loss in LOSSES
            if (steps := line.get("at_risk", {}).get(loss)) is not None
        ],
        "snapshots": [
            {"tier": tier, "step": step, "age": formatting.duration(max(0.0, now - at_s)) if step >= 0 else ""}
            for tier, (step, at_s) in kept.items()
        ],
        "nodes": {
            **line.get("nodes", {}),
            "spares wanted": line.get("spares", 0),
            "in quarantine": line.get("quarantined", 0),
        },
        "leader": line.get("leader", ""),
        "etcd": formatting.duration(line["etcd_s"]) if "etcd_s" in line else "does not answer" if line else "",
    }


def curve(progress: Sequence[Mapping[str, Any]], since_s: float) -> dict[str, list[Any]]:
    """Return the course of step, loss and step time since `since_s`, thinned to POINTS."""
    chosen = [line for line in progress if line["at_s"] >= since_s and (line.get("step") or 0) >= 0]
    every = len(chosen) // POINTS + 1
    kept = [line for at, line in enumerate(chosen) if (len(chosen) - 1 - at) % every == 0]
    return {name: [line.get(name) for line in kept] for name in ("at_s", "step", "loss", "step_s")}


def further(
    start: Mapping[str, Any], written: Sequence[Mapping[str, Any]], incidents: Mapping[str, Incident]
) -> dict[str, Any]:
    """Return what the lower part of the page shows: what snapshots on disk cost, which data was left out, configuration and versions.
    start: the newest line of that kind. written: the drain processes' events."""
    durable = [each for each in written if each["event"] == "durable"]
    seconds = [each.get("seconds", 0.0) for each in durable]
    size = sum(each.get("bytes", 0) for each in durable)
    configuration = start.get("configuration", {})
    return {
        "snapshots": {
            "written to disk": f"{len(durable):,}",
            "bytes in all": formatting.size(size),
            "time to write one, on average": formatting.duration(sum(seconds) / len(seconds)) if seconds else "–",
            "longest time to write one": formatting.duration(max(seconds)) if seconds else "–",
            "writes that failed": f"{len(written) - len(durable):,}",
        },
        "windows": [
            [printable(formatting.batches(i.window)), number]
            for number, i in incidents.items()
            if i.window
            and any(kept.start <= i.window.start < kept.stop for kept in left_out(turns([*incidents.values()])))
        ],
        "configuration": {printable(name): printable(str(value)) for name, value in configuration.items()},
        "versions": {printable(name): printable(found) for name, found in start.get("versions", {}).items()},
    }


def row(number: str, incident: Incident) -> dict[str, Any]:
    """Return an incident as the table shows it."""
    over = "under way" if incident.open else explain.result(incident)
    return {
        "number": number,
        "at_s": incident.at_s,
        "summary": printable(incident.summary),
        "cause": incident.cause.replace("_", " "),
        "rung": explain.rung(incident.rung),
        "result": "still lasts" if incident.open and incident.rung == OBSERVE else over,
        "lost_steps": incident.lost_steps,
        "seconds": round(sum(incident.phases_s.values()), 3),
        "step": incident.step_at_fault,
        "window": formatting.batches(incident.window) if incident.window else "",
    }


def story(number: str, incident: Incident, when: str) -> dict[str, Any]:
    """Return an incident as its drill-down shows it: its phases in their order, and the lines of `explain`."""
    phases = {name: incident.phases_s[name] for name in PHASES if name in incident.phases_s}
    return {"phases": phases, "lines": [printable(line) for line in told(incident, when, number)]}
