"""From what the journals say to what the page shows: the sentence of state, what to do, costs, curve and incidents. Pure."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..model.incident import PHASES, Incident, turns
from ..model.rewind import left_out
from ..plan.escalation import OBSERVE, STOP
from ..text import formatting, secrets
from ..text.formatting import printable
from . import explain
from .doubts import doubts
from .needs import needs, told
from .overview import LOSSES, TIERS, Overview, State

POINTS = 1500
"""The most points of a curve that are sent. Of a curve with more points, every n-th is sent."""
SILENT_S = 200.0
"""After this many seconds without a `progress` line, the leader counts as silent. A leader writes such a line at least every minute."""
STILL_S, START_S = 600.0, 1800.0
"""Seconds without a step, and without the first step of a start, after which a person should look."""
_QUIET = {
    0: "normally",
    129: "by SIGHUP",
    130: "by Ctrl-C",
    131: "by SIGQUIT",
    138: "by its scheduler's SIGUSR1",
    140: "by its scheduler's SIGUSR2",
    143: "by SIGTERM (a preemption)",
    152: "by its scheduler's SIGXCPU",
}


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What is known of a job, from outside."""

    finished: bool
    alive: bool
    """Whether an agent runs in the run directory."""
    gone: bool = False
    """Whether the agent of the run directory was killed on this machine."""
    stepped_s: float = math.inf
    """When the ranks had last made a step, or had a reason for making none."""
    launched: bool = False
    """Whether agents were started from here with a hostfile."""
    last: Mapping[str, Mapping[str, Any]]
    """The newest line of each kind (`RunReader.last`)."""
    incidents: Mapping[str, Incident]
    directory: str = ""
    """The run directory, for the commands that are advised; empty: none is named."""


URGENCY = {"good": "no action", "info": "no action", "warn": "look by day", "bad": "act now"}
"""Whether a person must act, by mood."""


def state(seen: Seen, now: float) -> dict[str, Any]:
    """Return the sentence of state. mood: a key of URGENCY. act: what a person should do, the most urgent first; commands in backticks."""
    told = _state(seen, now)
    where = f" --run-dir {shlex.quote(seen.directory)}" if seen.directory else ""
    acts = [re.sub(r"`(mt-resilient [^`]*)`", lambda found: f"`{found[1]}{where}`", act) for act in told["act"]]
    return {**told, "urgency": URGENCY[told["mood"]], "act": acts}


def sentence(state: Mapping[str, Any]) -> str:
    """Return the state in one line, for a terminal."""
    urgent = f"{state['urgency'].capitalize()}: " if URGENCY[state["mood"]] != "no action" else ""
    return f"{state['words']}. {urgent}{' '.join(state['act']) or 'Nothing to do.'}"


def _state(seen: Seen, now: float) -> dict[str, Any]:
    line, start = seen.last.get("progress", {}), seen.last.get("start", {})
    at = _step(line) if line.get("step", -1) >= 0 else "its start"
    ago_s = abs(now - max(line.get("at_s", 0.0), start.get("at_s", 0.0)))  # the clock of another machine may be ahead
    here = " here" if start.get("several") and not seen.launched else ""
    if seen.finished:
        return _said("good", f"Finished after {at}" if line.get("step", -1) >= 0 else "Finished")
    if (code := _ended(seen)) is not None:
        return _stopped(seen, code, at, here, now)
    if seen.gone or (not seen.alive and ago_s > SILENT_S and (line or not (here or seen.launched))):
        words = f"Not training{here}: its agent is gone without a word since {at}, for {formatting.duration(ago_s)}"
        return _said("bad", words, *_again(seen, here))
    if not line and (here or seen.launched):
        elsewhere = "Look into the run directory of that node: `mt-resilient status` names it."
        return _said("warn", "Not known: the job's progress is in the journal of the node that leads it", elsewhere)
    if ago_s > SILENT_S:
        words = f"Silent: the last report is {formatting.duration(ago_s)} old, from {at}"
        return _said("warn" if here else "bad", words, "Does it still train? `mt-resilient status`.")
    if not line:
        return _said("info", "Starting: no agent that leads has written a line yet")
    return _running(seen, State(line["state"]), at, line, now)


def _stopped(seen: Seen, code: int, at: str, here: str, now: float) -> dict[str, Any]:
    what, since = "agent" if here else "job", f" for {formatting.duration(max(1.0, now - seen.last['end']['at_s']))}"
    start, bad, again = seen.last.get("start", {}), seen.last.get("bad"), _again(seen, here)
    if code in _QUIET:
        return _said("warn", f"Not training{here}{since}: the {what} ended {_QUIET[code]} after {at}", *again)
    stopped = f"the {what} has stopped with exit code {code} after {at}"
    if not bad:
        return _said("bad", f"Not training{here}{since}: {stopped}", *again)
    why = str(bad["sentence"]).removeprefix("stopped: ").partition(". Everything is kept")[0].rstrip(".")
    last = [(n, i) for n, i in seen.incidents.items() if i.at_s >= start.get("at_s", 0.0)][-1:]
    if not last or last[0][1].rung != STOP:
        return _said("bad", f"Not training{here}{since}: {why}", f"T{stopped[1:]}. Correct that.", *again)
    (number, incident) = last[0]
    act = (
        needs(incident).act.replace("explain`", f"explain {number}`").removesuffix(", and give the same command again")
    )
    first = f"T{stopped[1:]}: {incident.plan}."
    return _said("bad", f"Not training{here}{since}: {incident.summary}", first, formatting.sentence(act), *again)


def _again(seen: Seen, here: str) -> list[str]:
    """Return how to start the job again. here: empty if the job cannot continue on other nodes."""
    command = secrets.hidden_line(seen.last.get("start", {}).get("again", ""))
    known = f": `{command}`" if command and not seen.launched else ""
    known += f", with what {secrets.HIDDEN} hides" if known and secrets.HIDDEN in command else ""
    asked = ["Does the job continue on other nodes? `mt-resilient status`. If not:"] if here else []
    return [" ".join([*asked, f"Give the same command again{known}. It continues from the newest snapshot."])]


def _step(line: Mapping[str, Any]) -> str:
    return f"step {line['step']}{f' of {total}' if (total := line.get('total')) else ''}"


def figures(line: Mapping[str, Any], up_s: float | None) -> list[str]:
    """Return the step, the pace, the loss and how long the agent has run, as far as they are known. line: of the kind `progress`."""
    found = [_step(line)] if line.get("step", -1) >= 0 else []
    found += [f"{formatting.duration(line['step_s'])} a step"] if line.get("step_s") else []
    found += [f"loss {line['loss']:g}"] if line.get("loss") is not None else []
    return found + ([f"up {formatting.duration(up_s)}"] if up_s is not None else [])


def present_line(line: Mapping[str, Any], told: Overview, now: float) -> dict[str, Any]:
    """Return the newest `progress` line, with the values that etcd has now instead of those in the journal."""
    before = line.get("snapshots", {})
    kept = {
        tier: (step, before[tier][1] if tier in before and before[tier][0] == step else now)
        for tier, step in told.snapshots.items()
    }
    known = {"step": told.step if told.step >= 0 else line.get("step", -1)}  # ranks that restart have none yet
    return {**line, **asdict(told), **known, "snapshots": kept, "at_s": now}


def _running(seen: Seen, doing: State, at: str, line: Mapping[str, Any], now: float) -> dict[str, Any]:
    under_way = [i for i in seen.incidents.values() if i.open and OBSERVE < i.rung < STOP][-1:]
    since = "".join(f" for {formatting.duration(max(0.0, now - i.at_s))}" for i in under_way)
    if doing is State.RECOVERING and not under_way and seen.last.get("incident", line)["at_s"] > line["at_s"]:
        doing = State.TRAINING  # the incident has closed since
    still_s = line["at_s"] - seen.stepped_s
    if doing in (State.TRAINING, State.RECOVERING, State.STARTING) and still_s > (
        START_S if doing is State.STARTING else max(STILL_S, 20 * line.get("step_s", 0.0))
    ):
        unwatched = "" if line.get("step", -1) >= 0 else " A script without a loop that is watched reports no steps."
        words = f"No step for {formatting.duration(still_s)}, at {at}; the agent says: {doing}"
        return _said("bad", words, f"Read `mt-resilient explain`, and the stacks in logs/stacks-*.txt.{unwatched}")
    match doing:
        case State.RECOVERING:
            resumes = "".join(f", from step {i.resume_step}" for i in under_way if (i.resume_step or -1) >= 0)
            why = "".join(f": {i.summary}" for i in under_way)
            alone = f"The job recovers by itself, mostly within minutes. Look again if this takes more than {STILL_S / 60:.0f} min."
            return _said("info", f"Recovering{since}{resumes or f', at {at}'}{why}", alone)
        case State.WAITING:
            nodes = [node for i in under_way for node in i.nodes]
            lost = f"{formatting.listed(nodes)} {'are' if nodes[1:] else 'is'} lost, " if nodes else ""
            missing = formatting.count(line["missing"], "node") if line.get("missing") else "nodes"
            others = "the command of the other nodes, but with its own --node and --address, or torchrun's --node-rank"
            start = f"Start {missing}, each with {others}."
            if nodes:
                start = f"Start {formatting.listed(nodes)} again, as before. Or start another machine, with {others}."
            resumes = f"The job waits at {at}. It resumes by itself as soon as {missing} {'has' if missing == '1 node' else 'have'} joined."
            return _said("bad", f"Not training{since}: {lost}waiting for {missing}", start, resumes)
        case State.PAUSED:
            return _said("info", f"Paused at {at}, as ordered", "To continue: `mt-resilient resume`.")
        case State.STARTING:
            return _said("info", "Starting: the ranks have reported no step yet")
        case State.ENDED:
            return _said("info", f"Ending, at {at}")
    pace = f", {formatting.duration(line['step_s'])} a step" if line.get("step_s") else ""
    if not (found := doubts(seen.last, line, seen.incidents, now)):
        return _said("good", f"Training: {at}{pace}")
    acts = [found[0].act, *(f"{formatting.sentence(each.what)} {each.act}" for each in found[1:])]
    said = _said("bad" if found[0].urgent else "warn", f"Training, but {found[0].what}", *acts)
    return {**said, "figures": ", ".join(figures(line, None))}


def last_incident(incidents: Mapping[str, Incident]) -> dict[str, Any] | None:
    """Return the row of the newest incident that was answered; None: there is none."""
    answered = [(number, i) for number, i in incidents.items() if i.rung != OBSERVE]
    return row(*answered[-1]) if answered else None


def _ended(seen: Seen) -> int | None:
    """Return the exit code with which the last agent here ended; None: it runs, or ended without a message."""
    end, start = seen.last.get("end"), seen.last.get("start", {"at_s": 0.0})
    return int(end["code"]) if end and not seen.alive and end["at_s"] >= start["at_s"] else None


def _said(mood: str, words: str, *act: str) -> dict[str, Any]:
    return {"mood": mood, "words": printable(words), "act": [printable(each) for each in act]}


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
    """Return what the lower part of the page shows: what snapshots on disk cost, which data was skipped, configuration and versions. start:
    the newest line of that kind. written: the drain processes' events."""
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
        "configuration": {
            printable(name): printable(secrets.value(name, value)) for name, value in configuration.items()
        },
        "versions": {printable(name): printable(found) for name, found in start.get("versions", {}).items()},
    }


def row(number: str, incident: Incident, back: bool = False) -> dict[str, Any]:
    """Return an incident as the table shows it. back: whether it came back (`time_ledger.came_back`)."""
    over = (
        "came back"
        if back
        else "under way"
        if incident.open
        else explain.result(incident).replace("in vain", "did not help")
    )
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
    """Return an incident as its drill-down shows it: its phases in sequence, and the lines of `explain`."""
    phases = {name: incident.phases_s[name] for name in PHASES if name in incident.phases_s}
    return {"phases": phases, "lines": [printable(line) for line in told(incident, when, number)]}
