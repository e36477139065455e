"""Reports the agent's events: one line each on the terminal, every event in the journal, every figure in the metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ...resilience.clock import monotonic_s, wall_s
from ...resilience.ipc.board_layout import Page
from ...resilience.model.cause import Cause
from ...resilience.model.cluster_state import World
from ...resilience.model.generation import Decision
from ...resilience.model.incident import Incident
from ...resilience.model.node import NodeStatus
from ...resilience.model.rewind import Remedy
from ...resilience.plan.escalation import OBSERVE, REWIND_IN_PLACE, STOP
from ...resilience.report import explain
from ...resilience.report.journal import Journal
from ...resilience.report.metrics import Metrics
from ...resilience.text import formatting
from .progress import Progress
from .terminal import Recorded, Terminal


class Telling:
    def __init__(
        self,
        terminal: Terminal,
        journal: Journal,
        metrics: Metrics,
        hook: Callable[[Incident], None] = lambda incident: None,
    ) -> None:
        """hook: called with each incident when it begins and when it is over."""
        self._terminal, self._journal, self._metrics = Recorded(terminal, journal), journal, metrics
        self.progress = Progress(journal, metrics)
        self._hook = hook
        self._began_s = monotonic_s()
        self._lost_s = 0.0
        self._starved = False
        self._waited_s = 0.0
        """Seconds from the start of this agent to the first finished step; 0 until then."""
        self._known: dict[tuple[int, str], Incident] = {}
        """Incidents by generation and number. The number alone does not suffice: if etcd loses its data, numbers restart."""
        self._counted = (0, 0)
        self._paused_s = 0.0
        """Seconds that all ranks spent in a pause that an operator ordered. Time in such a pause counts neither as a loss nor as
        training."""
        self._looked_s = self._began_s

    def say(self, sentence: str, mood: str = "info") -> None:
        """Write one line to the terminal and the journal. mood: info, good, warn or bad."""
        self._terminal.say(sentence, wall_s(), mood)

    def decided(self, decision: Decision) -> None:
        """Report a decision of the controller that the store has accepted."""
        if decision.said:
            self.say(decision.said)
        for ident, answer in decision.answers.items():
            self._journal.write("answer", wall_s(), request=ident, answer=asdict(answer))
        for answer in dict.fromkeys(decision.answers.values()):  # at Ctrl-C each agent asks: print it once
            self.say(answer.sentence, "warn" if answer.exit_code else "good")
        for incident in decision.incidents:
            self._journal.write("incident", wall_s(), incident=asdict(incident))
        began = [i for i in decision.incidents if i.open and (i.generation, i.id) not in self._known]
        closed = [incident for incident in decision.incidents if self._incident(incident)]
        for incident in (*began, *closed):
            self._hook(incident)
        self.progress.recovered([incident for incident in closed if incident.rung not in (OBSERVE, STOP)])
        for node, entry in decision.quarantine.items():
            self._journal.write("quarantine", wall_s(), node=node, quarantine=asdict(entry))
            if not entry.readmitted_s:  # the answer to `readmit` reports that
                self.say(f"{node} is quarantined, and does not train for now: {entry.reason}", "warn")
        if decision.record:
            self._journal.write("generation", wall_s(), record=asdict(decision.record))

    def _incident(self, incident: Incident) -> bool:
        """Report an incident, as far as it is new. Return whether it has just ended."""
        name = (incident.generation, incident.id)
        before = self._known.get(name)
        self._known[name] = incident
        for sentence in incident.evidence[len(before.evidence) :] if before else ():
            self.say(sentence, "warn")
        if before is not None and not before.open:  # the incident had ended before, and its end was reported
            return False
        if before is None:
            when = "" if incident.rung == REWIND_IN_PLACE else f" ({explain.struck(incident)})"
            hopeless = incident.rung == STOP or incident.remedy == Remedy.CONTINUE
            self.say(f"{incident.summary}{when}; {incident.plan}", "bad" if hopeless else "warn")
        if incident.open:
            return False
        ordered = incident.cause == Cause.ORDERED
        self._metrics.recovery(incident)
        over, mood = explain.result(incident), {"in vain": "warn", "not cured": "bad"}
        if (
            over != "interrupted" and incident.rung not in (OBSERVE, STOP) and not ordered
        ):  # the answer to the order reports that
            self.say(explain.outcome(incident), mood.get(over, "good"))
        self._lost_s += sum(incident.phases_s.values())
        return True

    def drained(self, event: dict[str, Any], through: bool = False) -> None:
        """Report an event of the drain process (which writes snapshots). through: the ranks have reached the end of the training."""
        goes_on = "the training has ended" if through else "training continues"
        self._journal.write("drain", wall_s(), event=event)
        match event["event"]:
            case "durable":
                self._metrics.durable(int(event["bytes"]))
                took = formatting.seconds(float(event["seconds"]))
                self.say(f"step {event['step']} is on disk ({formatting.size(int(event['bytes']))} in {took})")
            case "failed":
                self._metrics.failed()
                retry = event.get("retry_in_s")
                again = f"tried again in {retry:.0f} s" if retry else "given up"
                sentence = (
                    f"step {event['step']} could not be written; {goes_on}, and the write is {again}: {event['reason']}"
                )
                self.say(sentence, "bad")
            case "replicated":
                self._metrics.copied()
            case "reserved":
                size = formatting.size(int(event["bytes"]))
                self.say(f"this node has reserved {size} of memory, and can replace another node at once")
            case "not reserved":
                self.say(f"this node cannot replace another node at once: {event['reason']}", "warn")
            case "fetched":
                took = formatting.seconds(float(event["seconds"]))
                amount = formatting.size(int(event["bytes"]))
                self.say(f"step {event['step']} was fetched from another node's memory ({amount} in {took})", "good")
            case "not fetched":
                self.say(f"step {event['step']} was not fetched from another node's memory: {event['reason']}", "bad")
            case "buddy lost" | "deaf":
                lost = "a node that is lost now costs the steps since the last snapshot on disk"
                self.say(f"{event['reason']}: no copies of snapshots are made; {lost}", "warn")
            case "not replicated":
                self.say(f"step {event['step']} was not copied to another node: {event['reason']}", "warn")
            case "died":
                self.say(
                    f"{event['reason']}; {goes_on}, and the process is started again in {event['retry_in_s']:.0f} s",
                    "bad",
                )

    def silent(self, sentence: str, mood: str) -> None:
        """Report silent ranks. mood: as for `say`, or `suspected`, which the metrics count."""
        if mood == "suspected":
            self._metrics.suspected()
        self.say(sentence, "warn" if mood == "suspected" else mood)

    def strides(self, stragglers: int, own_s: Mapping[int, float]) -> None:
        """Record in the metrics the number of stragglers, and each local rank's own time per step."""
        self._metrics.strides(stragglers, own_s)

    def count(self, pages: Sequence[Page], told: NodeStatus | None, world: World | None) -> None:
        """Update the metrics from the ranks' pages and the node's status, and report the progress. world: None if this agent does not
        lead."""
        self.progress.look(world, pages)
        now = monotonic_s()
        taken, skipped = sum(p.snapshots for p in pages), sum(p.skipped for p in pages)
        grown = taken >= self._counted[0] and skipped >= self._counted[1]
        before = self._counted if grown else (0, 0)  # a new generation starts its pages at 0
        self._metrics.staged(taken - before[0], skipped - before[1])
        self._counted = (taken, skipped)
        starved = [str(page.rank) for page in pages if page.starved]
        if starved and not self._starved:
            self.say(
                f"there is no memory for the snapshots of rank {', '.join(starved)}: training continues, but a fault now costs all steps "
                "since the last snapshot that was kept. Give the machine more memory, or fewer ranks",
                "bad",
            )
        self._starved = bool(starved)
        stall_s = max((p.stall_ns for p in pages), default=0) / 1e9
        if not self._waited_s and told and told.stepped_s:
            self._waited_s = max(1e-9, now - self._began_s)
        if told and told.paused:
            self._paused_s += now - self._looked_s
        self._looked_s = now
        elapsed_s = max(now - self._began_s - self._paused_s, 1e-9)
        self._metrics.now(
            step=min((p.step for p in pages), default=-1),
            generation=told.generation if told else 0,
            alive=told.alive if told else 0,
            paused=told is not None and told.paused,
            stall_s=stall_s,
            effective=max(0.0, 1.0 - (self._lost_s + (self._waited_s or elapsed_s) + stall_s) / elapsed_s),
        )
