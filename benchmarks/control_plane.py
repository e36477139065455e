"""Measure how many agents one etcd carries: simulated agents, a real controller and a real etcd, all on this machine.

    python benchmarks/control_plane.py [--nodes 100 1000 5000 10000] [--own-connections] [--seconds S]

The agents (`crowd.py`) run in two to eight processes, one for two cores. They write as often as `resilience/store/write_rates.py` says. A
hundred agents share a connection, as behind a relay, unless `--own-connections` gives each agent its own. The leader (`head.py`) is the
real controller. After a period without faults, a rank on one node dies. This happens three times. Each time all agents report that they are
ready, launch, and report that they run.

Where the figures come from:

* operations: etcd's count of the messages that it has received
* cores and memory: the kernel
* change: from the fault until all agents are ready
* gather: from the record of the new generation to the next record, which needs all READY acknowledgements
* launch: from that next record to the third record, which needs all RUNNING acknowledgements
* tick: the processor time of the leader's thread, because other processes use the same cores

Predicted for 1,000, 5,000 and 10,000 nodes, from the cost of single operations: 860, 2,170 and 3,000 operations a second; 0.16, 0.45 and
0.7 cores of etcd; 80, 200 and 350 MB; gather 0.35, 1.6 and 3.2 s; a tick of 3, 12 and 25 ms at rest. Measured: docs/scaling.md, "One etcd,
ten thousand agents". On two busy cores, etcd used 434 MB for 1,000 nodes with a connection each, and 59 MB if they shared ten connections.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from crowd import KEYS, name_of, status
from measure import Result, arguments, count, report, say

from mt_resilient.agent.etcd.binary import find_server
from mt_resilient.agent.etcd.server import EmbeddedEtcd
from mt_resilient.resilience.model.node import Spec
from mt_resilient.resilience.model.signals import RankExit
from mt_resilient.resilience.model.types import Rank
from mt_resilient.resilience.store.codec import dumps
from mt_resilient.resilience.store.etcd.client import EtcdStore
from mt_resilient.resilience.store.write_rates import pace

HERE = Path(__file__).parent
PER_CONNECTION = 100
FAULTS = 3
CROWDS = max(2, min(8, (os.cpu_count() or 2) // 2))
WITHIN_S = 120.0
"""The most seconds to wait for a record."""
UNITS = {"operations": "1/s", "etcd_cores": "cores", "memory_mb": "MB"}
LIMITS = {
    "operations": (3_500.0, "<= 3,500 a second"),
    "change_s": (2.0, "fault reported to all ready <= 2 s"),
    "tick_s": (0.1, "<= 100 ms"),
    "change_tick_s": (0.1, "<= 100 ms"),
}


def child(script: str, *words: object) -> subprocess.Popen[str]:
    """Start a script of this folder, which ends when its standard input does."""
    command = [sys.executable, str(HERE / script), *map(str, words)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


class Head:
    """The leader's process, and its reports."""

    def __init__(self, endpoint: str) -> None:
        self.process = child("head.py", endpoint)
        self.ticks: list[float] = []
        self.records: dict[tuple[int, str], float] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said = json.loads(line)
            if "tick_s" in said:
                self.ticks.append(said["tick_s"])
            else:
                self.records[said["record"], said["phase"]] = said["at_s"]

    def wait(self, number: int, phase: str) -> None:
        ends_s = time.monotonic() + WITHIN_S
        while (number, phase) not in self.records:
            if time.monotonic() > ends_s:
                raise SystemExit(f"generation {number} did not reach phase {phase} within {WITHIN_S:.0f} s")
            time.sleep(0.01)


def operations(endpoint: str) -> float:
    """Return the number of messages that etcd has received from clients so far."""
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("grpc_server_msg_received_total{"))


def measure(nodes: int, own: bool, seconds: float) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        server = EmbeddedEtcd(find_server(), Path(folder) / "data", Path(folder) / "etcd.log")
        endpoint = server.start()
        crowds: list[subprocess.Popen[str]] = []
        head: Head | None = None
        try:
            store = EtcdStore([endpoint], deadline_s=20.0)
            store.put(KEYS.spec, dumps(Spec(command=("train",), sizes=(nodes,))))
            for crowd_number in range(CROWDS):
                first = nodes * crowd_number // CROWDS
                agents = nodes * (crowd_number + 1) // CROWDS - first
                lines = agents if own else max(1, agents // PER_CONNECTION)
                crowds.append(child("crowd.py", endpoint, first, agents, nodes, lines))
            for crowd in crowds:
                assert crowd.stdout is not None
                if crowd.stdout.readline() != "ready\n":
                    raise SystemExit("the simulated agents did not start: see their message above")
            head = Head(endpoint)
            head.wait(1, "run")
            return _measured(nodes, server, endpoint, store, head, seconds)
        finally:
            for process in [*crowds, *([head.process] if head else [])]:
                process.kill()
                process.wait()
            server.stop()


def _measured(
    nodes: int, server: EmbeddedEtcd, endpoint: str, store: EtcdStore, head: Head, seconds: float
) -> dict[str, Any]:
    etcd = psutil.Process(server.pid)
    time.sleep(2 * pace(nodes).keepalive_s)
    head.ticks.clear()
    before = operations(endpoint), spent(etcd), time.monotonic()
    time.sleep(seconds)
    took_s = time.monotonic() - before[2]
    figures: dict[str, Any] = {
        "operations": (operations(endpoint) - before[0]) / took_s,
        "etcd_cores": (spent(etcd) - before[1]) / took_s,
        "memory_mb": etcd.memory_info().rss / 1e6,
        "tick_s": statistics.median(head.ticks),
    }
    gathers, launches, changes = [], [], []
    head.ticks.clear()
    for generation in range(1, FAULTS + 1):
        gone = RankExit(rank=Rank(0), at_s=time.time(), code=-9, started=True)
        began_s = time.time()
        while (generation + 1, "gather") not in head.records:  # the simulated agent itself reports that all is well
            store.put(KEYS.status(name_of(0)), dumps(status(generation, nodes, exits=(gone,))))
            time.sleep(0.05)
        head.wait(generation + 1, "run")
        at = [head.records[generation + 1, phase] for phase in ("gather", "launch", "run")]
        gathers.append(at[1] - at[0])
        launches.append(at[2] - at[1])
        changes.append(at[1] - began_s)
        time.sleep(3.0)
    figures |= {"gather_s": statistics.median(gathers), "launch_s": statistics.median(launches)}
    figures |= {"change_s": statistics.median(changes), "change_tick_s": max(head.ticks)}
    return figures


def spent(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def results(nodes: int, figures: dict[str, Any]) -> list[Result]:
    rows = []
    for name, value in figures.items():
        limit, target = LIMITS.get(name, (None, None))
        rows.append(Result(f"{name}, {nodes} nodes", value, UNITS.get(name, "s"), limit=limit, target=target))
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--nodes", type=count, nargs="+", default=[100, 1_000, 5_000, 10_000], help="numbers of nodes")
    parser.add_argument("--own-connections", action="store_true", help="give each agent a connection of its own")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of rest that are measured (default: 20)")
    options = parser.parse_args()
    if options.seconds < 1:
        parser.error("the agents send little in less than a second; give at least 1 second")
    rows: list[Result] = []
    memory: dict[int, float] = {}
    for nodes in options.nodes:
        figures = measure(nodes, options.own_connections, options.seconds)
        say(f"  {nodes}: " + ", ".join(f"{name} {value:.3g}" for name, value in figures.items()))
        rows += results(nodes, figures)
        memory[nodes] = figures["memory_mb"]
    if len(memory) > 2:
        few, *_, some, many = sorted(memory)
        slope, last = ((memory[b] - memory[a]) / (b - a) for a, b in ((few, some), (some, many)))
        target = "linear: the last step's growth no more than 1.3 times the earlier ones'"
        rows.append(Result("MB a node", last, "MB", peer=slope, limit=1.3 * slope, target=target))
    report("control_plane", rows)


if __name__ == "__main__":
    main()
