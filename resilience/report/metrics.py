"""Prometheus metrics of faults, their costs, and the training's progress. The only module that imports prometheus_client.

Every label combination exists with value 0 from the start, because otherwise `increase()` would miss the first recovery.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, start_http_server

from ..errors import MachineError
from ..model.cause import Cause
from ..model.incident import PHASES, Incident

disable_created_metrics()  # they would double the size of /metrics

T = TypeVar("T")
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
RUNGS = ("0", "1", "2", "3", "4", "6")


class Metrics:
    def __init__(self, job: str) -> None:
        self.registry = CollectorRegistry()
        self._job = job

        def metric(kind: Callable[..., T], name: str, words: str, *labels: str, **more: Any) -> T:
            return kind(name, words, ["job", *labels], registry=self.registry, **more)

        def counter(name: str, words: str) -> Counter:
            return metric(Counter, name, words).labels(job)

        def gauge(name: str, words: str) -> Gauge:
            return metric(Gauge, name, words).labels(job)

        self._recoveries = metric(
            Counter, "mt_resilient_recoveries", "Recoveries, by cause and rung of the ladder", "cause", "rung"
        )
        self._phases = metric(
            Histogram, "mt_resilient_recovery_seconds", "Seconds of a recovery, by phase", "phase", buckets=_SECONDS
        )
        self._snapshots = metric(Counter, "mt_resilient_snapshots", "Snapshots, by outcome", "outcome")
        self._own = metric(
            Gauge,
            "mt_resilient_own_step_seconds",
            "Seconds that a step takes a rank without waits for its peers; absent if not known",
            "rank",
        )
        self._lost_steps = counter("mt_resilient_lost_steps", "Steps computed again after a fault")
        self._bytes = counter("mt_resilient_durable_bytes", "Bytes written to durable storage")
        self._suspicions = counter(
            "mt_resilient_suspected_hangs",
            "How often all ranks were silent for longer than their budgets, whether they hung or not",
        )
        self._stall = gauge(
            "mt_resilient_stall_seconds", "Seconds that the slowest local rank has spent at step boundaries"
        )
        self._effective = gauge(
            "mt_resilient_effective_training_time_ratio",
            "Share of the time since the start in which steps of the final lineage were computed",
        )
        self._stragglers = gauge("mt_resilient_stragglers", "Local ranks that are slower than their peers now")
        self._step = gauge("mt_resilient_step", "Newest step finished by all local ranks")
        self._generation = gauge("mt_resilient_generation", "Generation of the worker group")
        self._paused = gauge("mt_resilient_paused", "1 while all local ranks wait as ordered")
        self._alive = gauge("mt_resilient_ranks_alive", "Local ranks alive")
        for cause in Cause:
            for rung in RUNGS:
                self._recoveries.labels(job, cause, rung)
        for phase in PHASES:
            self._phases.labels(job, phase)
        for outcome in ("memory", "durable", "copied", "skipped", "failed"):
            self._snapshots.labels(job, outcome)

    def serve(self, port: int) -> int:
        """Serve /metrics on loopback and all other addresses of this node. Return the port; for 0, a free port is chosen. Raises
        MachineError."""
        try:
            server, _ = start_http_server(port, registry=self.registry)
        except OSError as error:
            raise MachineError(
                f"port {port} for /metrics is not available ({error.strerror}); name another one with --metrics-port"
            ) from error
        return int(server.server_port)

    def recovery(self, incident: Incident) -> None:
        """Count an incident that is over."""
        self._recoveries.labels(self._job, incident.cause, str(incident.rung)).inc()
        self._lost_steps.inc(incident.lost_steps)
        for phase, seconds in incident.phases_s.items():
            self._phases.labels(self._job, phase).observe(seconds)

    def durable(self, size_bytes: int) -> None:
        self._snapshots.labels(self._job, "durable").inc()
        self._bytes.inc(size_bytes)

    def copied(self) -> None:
        """Count one snapshot that was copied into another node's memory."""
        self._snapshots.labels(self._job, "copied").inc()

    def failed(self) -> None:
        """Count one snapshot that could not be written to disk."""
        self._snapshots.labels(self._job, "failed").inc()

    def suspected(self) -> None:
        """Count one suspected hang: all ranks were silent for longer than their budgets."""
        self._suspicions.inc()

    def staged(self, memory: int, skipped: int) -> None:
        """Add the numbers of new snapshots that all local ranks together copied into memory, and that they skipped."""
        self._snapshots.labels(self._job, "memory").inc(memory)
        self._snapshots.labels(self._job, "skipped").inc(skipped)

    def strides(self, stragglers: int, own_s: Mapping[int, float]) -> None:
        """Set the number of local stragglers and each rank's own time for a step, in seconds. own_s: by rank."""
        self._stragglers.set(stragglers)
        for rank, seconds in own_s.items():
            self._own.labels(self._job, str(rank)).set(seconds)

    def now(self, *, step: int, generation: int, alive: int, paused: bool, stall_s: float, effective: float) -> None:
        self._step.set(step)
        self._generation.set(generation)
        self._alive.set(alive)
        self._paused.set(int(paused))
        self._stall.set(stall_s)
        self._effective.set(effective)
