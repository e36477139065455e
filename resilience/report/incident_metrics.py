"""Counts the job's incidents for Prometheus. Only the agent that leads counts them. The figures of an agent that led before may have ended
with it, so an agent that begins to lead also counts the incidents that were over by then."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from ..model.cause import Cause
from ..model.incident import PHASES, Incident
from . import explain

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
RESULTS = {
    0: ("reported",),
    1: ("recovered", "in vain", "not cured", "interrupted"),
    2: ("recovered", "interrupted"),
    3: ("recovered", "interrupted"),
    4: ("recovered", "interrupted"),
    6: ("stopped",),
}
"""The results that an answer can have (`explain.result`), by rung."""


class IncidentMetrics:
    def __init__(self, job: str, registry: CollectorRegistry, only: str) -> None:
        """only: words that tell which agents have these metrics."""
        self._job = job
        self._counted: set[tuple[int, str, float]] | None = None
        """The incidents that are counted, by generation, number and time. None: the metrics are absent."""
        self._recoveries = Counter(
            "mt_resilient_recoveries",
            "Incidents of the job that are over, by cause, rung and result. Rung 0: only reported; 1: rewind in place; 2: restart of the "
            "ranks; 3: on a spare; 4: on another number of nodes; 6: stop. in vain: the fault recurred; interrupted: another fault, or "
            f"the end of the job, came first; {only}",
            ["job", "cause", "rung", "result"],
            registry=registry,
        )
        self._phases = Histogram(
            "mt_resilient_recovery_seconds",
            f"Seconds of a recovery, by phase: {', '.join(PHASES)}; {only}",
            ["job", "phase"],
            registry=registry,
            buckets=_SECONDS,
        )
        self._lost_steps = Counter(
            "mt_resilient_lost_steps", f"Steps computed again after a fault; {only}", ["job"], registry=registry
        )

    def count(self, *over: Incident) -> None:
        """Count these incidents, which are over, unless they are counted already. An incident's number and generation are the exemplar, for
        a Prometheus that scrapes OpenMetrics."""
        if self._counted is None:
            self._counted = set()
            self._at_zero()
        for incident in over:
            name = (incident.generation, incident.id, incident.at_s)
            if name not in self._counted:
                self._counted.add(name)
                self._add(incident)

    def clear(self) -> None:
        """Remove the metrics: this agent does not lead."""
        self._counted = None
        for each in (self._recoveries, self._phases, self._lost_steps):
            each.clear()

    def _at_zero(self) -> None:
        for cause in Cause:
            for rung, results in RESULTS.items():
                for result in results:
                    self._recoveries.labels(self._job, cause, str(rung), result)
        for phase in PHASES:
            self._phases.labels(self._job, phase)
        self._lost_steps.labels(self._job)

    def _add(self, incident: Incident) -> None:
        which = {"incident": incident.id, "generation": str(incident.generation)}
        result = explain.result(incident)
        self._recoveries.labels(self._job, incident.cause, str(incident.rung), result).inc(exemplar=which)
        if result != "interrupted":  # the next incident has the steps
            self._lost_steps.labels(self._job).inc(incident.lost_steps)
        for phase, seconds in incident.phases_s.items():
            self._phases.labels(self._job, phase).observe(seconds, exemplar=which)
