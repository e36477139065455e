"""How the first ranks of many nodes come together: one group of them all, and a grid of groups (`training/boundary/cross_node.py`).

    python benchmarks/first_ranks.py [--nodes N ...] [--rounds N]

A process for each node, forked, and one store for all of them as torchrun has it, on this machine: seconds from the last one's birth until
all are connected, the bytes that crossed loopback (what is read from the store, and some rows), and what an exchange takes with
nothing between two of them, while all processes share these cores. Both ways in turn.

Predicted for 256 nodes: 0.14 GB and half a minute on two cores in one group; 3 MB and 3 s in a grid, whose exchange takes as long, for
it has as many rounds (4 + 4 for 8). Measured: docs/scaling.md.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import statistics
import time

import numpy as np
import psutil
import torch
import torch.distributed as dist
from measure import Result, report, say
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers a backend that connects nothing)

from mt_resilient.agent.launch.ports import free_port
from mt_resilient.resilience.inprocess.tally import ROW
from mt_resilient.training.boundary.cross_node import MOST_IN_ONE, Rounds

EXCHANGES = 20
MARKS = ("born", "there", "exchange_ms")


def come_together(nodes: int, most_in_one: int) -> tuple[float, float, float]:
    """Return the seconds until all nodes are connected, the MB sent over loopback, and the median of an exchange in milliseconds."""
    port = free_port()
    server = multiprocessing.get_context("fork").Process(target=_store, args=(port,), daemon=True)
    server.start()
    marks = np.frombuffer(mmap.mmap(-1, 8 * len(MARKS) * nodes), np.float64).reshape(len(MARKS), nodes)
    children = []
    for node in range(nodes):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _node(node, nodes, most_in_one, port, dict(zip(MARKS, marks, strict=True)))
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    _all(marks[0])
    before = _loopback_bytes()
    _all(marks[1])
    moved = _loopback_bytes() - before
    assert all(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 for child in children)
    server.kill()
    return marks[1].max() - marks[0].max(), moved / 1e6, float(np.median(marks[2]))


def _store(port: int) -> None:
    """Serve the store forever, in its own process. A child that is forked while torch's threads resolve a host name would wait for their
    lock."""
    serving = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    time.sleep(3600)
    del serving


def _node(node: int, nodes: int, most_in_one: int, port: int, marks: dict[str, np.ndarray]) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, False)
    dist.init_process_group("fake", store=store, rank=node, world_size=nodes)
    marks["born"][node] = time.monotonic()
    _all(marks["born"])
    rounds = Rounds(node, nodes, most_in_one)
    marks["there"][node] = time.monotonic()
    _all(marks["there"])
    took_ms = []
    for number in range(EXCHANGES):
        started = time.perf_counter()
        assert rounds.maxima((float(number + (number % nodes == node)),) * ROW)[0] == number + 1
        took_ms.append((time.perf_counter() - started) * 1e3)
    marks["exchange_ms"][node] = statistics.median(took_ms)
    _all(marks["exchange_ms"])


def _all(marks: np.ndarray) -> None:
    """Wait until every node has set its mark."""
    while not marks.all():
        time.sleep(0.1)


def _loopback_bytes() -> int:
    return psutil.net_io_counters(pernic=True)["lo"].bytes_sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--rounds", type=int, default=3, help="how often each way")
    options = parser.parse_args()
    results = []
    for nodes in options.nodes:
        grids, groups = [], []
        for _ in range(options.rounds):
            grids.append(come_together(nodes, min(MOST_IN_ONE, nodes - 1)))
            groups.append(come_together(nodes, nodes))
            say(f"  {nodes} nodes: a grid {grids[-1]}, one group {groups[-1]}")
        for at, (what, unit) in enumerate((("start", "s"), ("through the store", "MB"), ("an exchange", "ms"))):
            ours, peer = (statistics.median(each[at] for each in way) for way in (grids, groups))
            results.append(
                Result(name=f"{nodes} nodes: {what} (peer: one group)", ours=float(ours), peer=float(peer), unit=unit)
            )
    report("first_ranks", results)


if __name__ == "__main__":
    main()
