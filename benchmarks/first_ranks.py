"""Measure how the lowest-numbered ranks of many nodes connect: in one group of all nodes, and in a grid of groups (`cross_node.py`).

    python benchmarks/first_ranks.py [--nodes N ...] [--rounds N]

All nodes are forked processes of this machine. One process serves the store, as under torchrun. For each of the two ways, the benchmark
measures three figures:

* the seconds from the start of the last process until all are connected,
* the bytes over loopback, nearly all of which are answers of the store,
* the time of an exchange of rows, while all processes share the machine's cores.

Predicted for 256 nodes on two cores: 0.14 GB and half a minute in one group, 3 MB and 3 s in a grid. The exchange takes as long in the
grid, which has as many rounds (4 + 4 instead of 8). Measured: docs/scaling.md, "2,048 nodes".
"""

from __future__ import annotations

import mmap
import multiprocessing
import statistics
import time
from functools import partial

import numpy as np
import psutil
import torch
import torch.distributed as dist
from jobs import forked
from measure import Result, arguments, count, report, say, timed
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
    wait = forked(nodes, lambda node: _node(node, nodes, most_in_one, port, dict(zip(MARKS, marks, strict=True))))
    _all(marks[0])
    before = _loopback_bytes()
    _all(marks[1])
    moved = _loopback_bytes() - before
    wait()
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

    def exchange(number: int) -> None:
        assert rounds.maxima((float(number + (number % nodes == node)),) * ROW)[0] == number + 1

    marks["exchange_ms"][node] = statistics.median(1e3 * timed(partial(exchange, n)) for n in range(EXCHANGES))
    _all(marks["exchange_ms"])


def _all(marks: np.ndarray) -> None:
    """Wait until every node has set its mark."""
    while not marks.all():
        time.sleep(0.1)


def _loopback_bytes() -> int:
    return psutil.net_io_counters(pernic=True)["lo"].bytes_sent


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--nodes", type=count, nargs="+", default=[128, 256], help="numbers of nodes, each at least 2")
    parser.add_argument("--rounds", type=count, default=3, help="number of measurements of each way (default: 3)")
    options = parser.parse_args()
    if min(options.nodes) < 2:
        parser.error("a single node has no other node to connect to; give at least 2")
    results = []
    for nodes in options.nodes:
        grids, groups = [], []
        for _ in range(options.rounds):
            grids.append(come_together(nodes, min(MOST_IN_ONE, nodes - 1)))
            groups.append(come_together(nodes, nodes))
            say(f"  {nodes} nodes: a grid {grids[-1]}, one group {groups[-1]}")
        for at, (what, unit) in enumerate((("start", "s"), ("through the store", "MB"), ("an exchange", "ms"))):
            ours, peer = (statistics.median(each[at] for each in way) for way in (grids, groups))
            results.append(Result(f"{nodes} nodes: {what} (peer: one group)", float(ours), unit, peer=float(peer)))
    report("first_ranks", results)


if __name__ == "__main__":
    main()
