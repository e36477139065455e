"""Prometheus metrics of faults, their costs, and the training's progress. This module and `incident_metrics.py` alone import
prometheus_client.

Every label combination of a counter exists with value 0 from the moment an agent has the counter, because otherwise `increase()` would miss
the job's first recovery."""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, start_http_server

from ..clock import monotonic_s
from ..errors import MachineError, StoreUnavailable
from ..membership.node_roles import Role
from ..model.incident import Incident
from .incident_metrics import IncidentMetrics
from .overview import LOSSES, TIERS, Overview, State
from .time_ledger import WHERE

disable_created_metrics()  # they would double the size of /metrics

T = TypeVar("T")
_DISK_S = 1.0
"""Seconds for which a file system may not answer before no scrape waits for it. Prometheus gives a scrape 10 s."""
_LOOPBACK = ("127.", "localhost", "[::1]")
ALL, OWN = "/sd", "/sd/own"
"""Paths for Prometheus' service discovery. ALL names the agents of all jobs that have an agent on this machine, OWN those of this job."""
JOB = "__meta_mt_resilient_job"
"""The label with the job's name. Prometheus drops labels of this form after relabelling."""
Target = dict[str, Any]
"""`targets`: addresses; `labels`: names and values. As Prometheus has them in files and answers."""


class Metrics:
    def __init__(self, job: str, node: str = "") -> None:
        self.registry = CollectorRegistry()
        self._node = node
        self.nodes: Callable[[], Mapping[str, str]] = dict
        """Returns the addresses of all nodes' metrics, by node. Raises StoreUnavailable. Set once etcd can be asked."""
        self.others: Callable[[str], list[Target]] = lambda host: []
        """Returns the agents of the other jobs that have an agent on this machine. host: the name of this machine in their addresses."""
        self._job = job

        def metric(kind: Callable[..., T], name: str, words: str, *labels: str, **more: Any) -> T:
            return kind(name, words, ["job", *labels], registry=self.registry, **more)

        def counter(name: str, words: str) -> Counter:
            return metric(Counter, name, words).labels(job)

        def gauge(name: str, words: str) -> Gauge:
            return metric(Gauge, name, words).labels(job)

        only = "of the agent that leads; absent from the others"
        self._incidents = IncidentMetrics(job, self.registry, only)
        self._snapshots = metric(
            Counter,
            "mt_resilient_snapshots",
            "Snapshots. memory and skipped: one per rank and snapshot; durable (on disk), copied (into another node's memory) and failed: "
            "one per snapshot",
            "outcome",
        )
        self._own = metric(
            Gauge,
            "mt_resilient_own_step_seconds",
            "Seconds that a step takes a rank without waits for its peers; absent if not known",
            "rank",
        )
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
        self._step = gauge("mt_resilient_step", "Newest step finished by all local ranks; NaN: none yet")
        self._generation = gauge("mt_resilient_generation", "Generation of the worker group")
        self._paused = gauge("mt_resilient_paused", "1 while all local ranks wait as ordered")
        self._alive = gauge("mt_resilient_ranks_alive", "Local ranks alive")
        self._loss = gauge(
            "mt_resilient_loss", "Loss of the newest step of this node's first rank that knows it; NaN: not known"
        )
        self._step_s = gauge("mt_resilient_step_time_seconds", "Seconds per step since the last look; NaN: not known")
        self._leads = gauge("mt_resilient_leads", "1 while this agent leads the job")
        self._etcd_up = gauge("mt_resilient_etcd_up", "0 while etcd does not answer this agent")
        self._etcd = gauge(
            "mt_resilient_etcd_write_seconds", "Seconds that this agent's last write of its status to etcd took"
        )
        self._time = metric(
            Counter,
            "mt_resilient_time_seconds",
            "Seconds of the job, by where they went. Each agent counts while it leads, so the sum over agents is the job's time",
            "where",
        )
        self._state = metric(Gauge, "mt_resilient_state", f"1: what the job does; {only}", "state")
        self._nodes = metric(Gauge, "mt_resilient_nodes", f"Nodes, by what they do; {only}", "part")
        self._spares = metric(Gauge, "mt_resilient_spares_wanted", f"Spares that the job was told to expect; {only}")
        self._quarantined = metric(Gauge, "mt_resilient_quarantined_nodes", f"Nodes in quarantine; {only}")
        self._newest = metric(
            Gauge,
            "mt_resilient_snapshot_step",
            f"Newest step that the whole job can restore, by tier; certified: the newest stable one; -1: none; {only}",
            "tier",
        )
        self._newest_s = metric(
            Gauge,
            "mt_resilient_snapshot_timestamp_seconds",
            f"Unix time at which the agent saw a snapshot of that step first, in whichever tier; 0: there is none; {only}",
            "tier",
        )
        self._at_risk = metric(
            Gauge, "mt_resilient_at_risk_steps", f"Steps computed again if this were lost now; {only}", "lost"
        )
        self._of_leader = (
            *(self._state, self._nodes, self._spares, self._quarantined),
            *(self._newest, self._newest_s, self._at_risk, self._incidents),
        )
        self._free = metric(
            Gauge, "mt_resilient_disk_free_ratio", "Free share of the file system; NaN: unknown", "place"
        )
        self._free_bytes = metric(
            Gauge, "mt_resilient_disk_free_bytes", "Free bytes of the file system; NaN: unknown", "place"
        )
        self._etcd_up.set(1)
        self._step.set(math.nan)
        self._loss.set(math.nan)
        self._step_s.set(math.nan)
        for where in WHERE:
            self._time.labels(job, where)
        for outcome in ("memory", "durable", "copied", "skipped", "failed"):
            self._snapshots.labels(job, outcome)

    def serve(self, *ports: int) -> int:
        """Serve /metrics and /sd on loopback and all other addresses of this node, at the first of `ports` that is free. Return the port;
        for 0, a free port is chosen. Raises MachineError if none of them is free."""
        for port in ports:
            try:
                server, _ = start_http_server(port, registry=self.registry)
                break
            except OSError as error:
                why = error.strerror
        else:
            raise MachineError(
                f"port {port} for /metrics is not available ({why}); name another one with --metrics-port"
            )
        metrics: Any = server.get_app()
        server.set_app(
            lambda asked, answer: (self._targets if asked["PATH_INFO"] in (ALL, OWN) else metrics)(asked, answer)
        )
        return int(server.server_port)

    def _targets(self, asked: dict[str, Any], answer: Callable[..., Any]) -> list[bytes]:
        """Answer a Prometheus that asks for its targets: with the agents of all nodes of this job and, at the path ALL, also with the other
        jobs' agents. If this machine has registered an address that other machines do not reach, its entry has the host name that
        Prometheus used in this request."""
        name = asked.get("HTTP_HOST", "")
        try:
            nodes = {**self.nodes()}
            if nodes.get(self._node, "127.").startswith(_LOOPBACK):
                nodes[self._node] = name
            found: list[Target] = [
                {"targets": [at], "labels": {"node": node, JOB: self._job}} for node, at in sorted(nodes.items())
            ]
        except StoreUnavailable:  # then Prometheus keeps the targets that it has
            answer("503 Service Unavailable", [])
            return [b"etcd does not answer\n"]
        more = self.others(name.rpartition(":")[0]) if asked["PATH_INFO"] == ALL else []
        each_once = {_agent(told): told for told in reversed((*found, *more))}  # agents of one job name each other
        answer("200 OK", [("Content-Type", "application/json")])
        return [json.dumps([*reversed(each_once.values())]).encode()]

    def recovery(self, incident: Incident) -> None:
        """Count an incident that is over, unless it is counted already."""
        self._incidents.count(incident)

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
        if not own_s:  # the node stands by
            self._own.clear()
        for rank, seconds in own_s.items():
            self._own.labels(self._job, str(rank)).set(seconds)

    def now(self, *, step: int, generation: int, alive: int, paused: bool, stall_s: float, effective: float) -> None:
        self._step.set(step if step >= 0 else math.nan)
        self._generation.set(generation)
        self._alive.set(alive)
        self._paused.set(int(paused))
        self._stall.set(stall_s)
        self._effective.set(effective)

    def progress(self, loss: float, step_s: float) -> None:
        self._loss.set(loss)
        self._step_s.set(step_s)

    def etcd(self, seconds: float | None) -> None:
        """Set how long a write to etcd took. None: etcd does not answer."""
        self._etcd_up.set(seconds is not None)
        if seconds is not None:
            self._etcd.set(seconds)

    def disks(self, places: Mapping[str, Path]) -> None:
        """Tell each place's free share and bytes at every scrape."""
        for name, path in places.items():
            disk = _Disk(path)
            for at, gauge in enumerate((self._free, self._free_bytes)):
                gauge.labels(self._job, name).set_function(partial(disk.free, at))

    def spend(self, where: str, seconds: float) -> None:
        self._time.labels(self._job, where).inc(seconds)

    def leads(self, told: Overview | None, since_s: Mapping[str, float], incidents: Iterable[Incident] = ()) -> None:
        """Set the figures of the whole job. told: the overview; None: this agent does not lead. since_s: for each tier, when its newest
        snapshot was first seen. incidents: those of the job. An agent that begins to lead counts also those that ended before, because
        the figures of the agent that led may have ended with it."""
        self._leads.set(told is not None)
        if told is None:
            for each in self._of_leader:
                each.clear()
            return
        self._incidents.count(*(each for each in incidents if not each.open))
        for state in State:
            self._state.labels(self._job, state).set(state == told.state)
        for part in Role:
            self._nodes.labels(self._job, part).set(told.nodes.get(part, 0))
        self._spares.labels(self._job).set(told.spares)
        self._quarantined.labels(self._job).set(told.quarantined)
        for tier in TIERS:
            self._newest.labels(self._job, tier).set(told.snapshots[tier])
            self._newest_s.labels(self._job, tier).set(since_s.get(tier, 0.0))
        for loss in LOSSES:
            self._at_risk.labels(self._job, loss).set(told.at_risk[loss])


def _agent(told: Target) -> tuple[Any, tuple[str, ...]]:
    """Return what distinguishes an agent from the others: its node, and its port."""
    return told["labels"].get("node"), tuple(str(at).rpartition(":")[2] for at in told["targets"])


class _Disk:
    def __init__(self, path: Path) -> None:
        self._path, self._free = path, (math.nan, math.nan)
        self._look: threading.Thread | None = None
        self._turn = threading.Lock()
        self._began_s = 0.0

    def free(self, at: int) -> float:
        """Return the free share of the file system (at 0), or its free bytes (at 1); NaN if it has not answered within `_DISK_S`. While it
        hangs, one thread waits for it, however often this is called."""
        with self._turn:
            if self._look is None or not self._look.is_alive():
                self._look = threading.Thread(target=self._ask, name="free space", daemon=True)
                self._look.start()
                self._began_s = monotonic_s()
            look = self._look
        look.join(max(0.0, self._began_s + _DISK_S - monotonic_s()))
        return math.nan if look.is_alive() else self._free[at]

    def _ask(self) -> None:
        free = math.nan, math.nan
        with suppress(OSError):
            usage = shutil.disk_usage(self._path)
            free = (usage.free / usage.total if usage.total else math.nan), usage.free
        self._free = free
