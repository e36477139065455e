"""Measure what the exchange of the ranks' rows at each boundary costs a training, on one node and on several.

    python benchmarks/sentinel.py [--rounds N] [--quick] [--only one|several]

One node: two ranks with steps of 100 ms (`sentinel_loop.py`). Three kinds of steps alternate: without a session, with a session's boundary
after each step, and with the heartbeat of NVIDIA's Resiliency Extension (NVRx 0.4.1). That heartbeat serves hang detection alone. NVRx is
skipped unless it is on the PYTHONPATH. (Install it into a separate directory: Megatron 0.17.1 does not start if this version is installed.)
The benchmark measures the boundary itself and the differences of paired steps, which scatter more. No snapshot is due.

Several nodes: forked processes of this machine, with one board for each simulated node. Each process sleeps for 100 ms between sending its
row and reading the result. The benchmark measures the time of sending plus reading, and the processor time of a step on a rank. The rows go
through the lowest-numbered rank of each node (`training/boundary/cross_node.py`), or through an all-reduce of all ranks. With fewer cores
than processes, the figures are upper bounds. The last results are of rounds without a pause between them.

Predicted: 0.1 ms for a boundary on one node; less time through one rank of each node than by an all-reduce, because only that rank has
threads that need a core. Measured: docs/scaling.md. The target of 0.1 ms is missed at steps of 100 ms, because such steps empty the
processor's caches (`cold_boundary.py`).
"""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from jobs import NEVER, REPOSITORY, forked, workplace, wrapped
from measure import Result, arguments, count, report, say, version

from mt_resilient.resilience.inprocess.tally import ROW
from mt_resilient.resilience.ipc.board_events import PAGE_BYTES
from mt_resilient.resilience.ipc.board_layout import Page
from mt_resilient.training.boundary.allreduce import Exchange, Group, Nodes, Pages
from mt_resilient.training.boundary.cross_node import Rounds

LIMIT_US = 100.0
SHAPES = ((2, 2), (4, 4, 4, 4), (2,) * 8)
"""The number of ranks of each node."""
STEP_S, STEPS, ROUNDS_ALONE = 0.1, 40, 500


def one_node(place: Path, rounds: int) -> list[Result]:
    script = str(REPOSITORY / "benchmarks" / "sentinel_loop.py")
    job = wrapped([script, str(rounds)], place / "one", "--no-warm", *NEVER)
    try:
        ranks = job.wait_for_figures("sentinel", 60 + 3 * rounds)
    finally:
        job.stop()

    def middle(part: str) -> float:
        return statistics.median(us for rank in ranks for us in rank["parts"][part])

    peer = "peer" in ranks[0]["steps"]
    target = "<= 0.1 ms on the critical path"
    ours_us, peer_us = _paired(ranks, "ours"), _paired(ranks, "peer") if peer else None
    results = [
        Result("one boundary, steps of 100 ms", middle("boundary"), "us", limit=LIMIT_US, target=target),
        Result("step with less step without, median of pairs", ours_us, "us", peer=peer_us),
    ]
    if peer:  # of its own client, to its own monitor
        results.append(Result("one NVRx heartbeat", None, "us", peer=middle("heartbeat")))
    return results + [
        Result(f"  of which {part}", middle(part), "us") for part in ("contribute", "take", "judge", "beat")
    ]


def _paired(ranks: Sequence[dict], way: str) -> float:
    """Return the median difference of paired steps. Steps are paired block by block, in the order in which they ran."""
    differences = [a - b for rank in ranks for a, b in zip(rank["steps"][way], rank["steps"]["plain"], strict=True)]
    return statistics.median(differences)


def several_nodes(place: Path, shape: Sequence[int], way: str, steps: int, pause_s: float) -> tuple[float, float]:
    """Return two figures in microseconds: the median time of all ranks at a boundary, and the processor time of one step on one rank."""
    world = sum(shape)
    figures = np.frombuffer(mmap.mmap(-1, world * 16)).reshape(world, 2)
    memory = memoryview(mmap.mmap(-1, world * PAGE_BYTES))
    store = place / f"store-{way}-{'-'.join(map(str, shape))}-{pause_s}"

    def act(rank: int) -> None:
        pages = [Page(memory[n * PAGE_BYTES : (n + 1) * PAGE_BYTES]) for n in range(world)]
        figures[rank] = _rank(_exchange(way, shape, rank, pages, store), steps, pause_s)

    forked(world, act)()
    return float(np.median(figures[:, 0])), float(figures[:, 1].mean())


def _exchange(way: str, shape: Sequence[int], rank: int, pages: list[Page], store: Path) -> Exchange:
    torch.set_num_threads(1)
    if way == "pages":
        return Pages(pages[rank], pages)
    dist.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=len(pages))
    if way == "all-reduce":
        return Group()
    node = next(n for n in range(len(shape)) if rank < sum(shape[: n + 1]))
    first = sum(shape[:node])
    return Nodes(pages[rank], pages[first : first + shape[node]], Rounds(node, len(shape)) if rank == first else None)


def _rank(exchange: Exchange, steps: int, pause_s: float) -> tuple[float, float]:
    took_us: list[float] = []
    for step in range(steps):
        if step == 10:
            cpu_s = time.process_time()
        started = time.perf_counter_ns()
        exchange.say((float(step),) * ROW)
        said = time.perf_counter_ns()
        time.sleep(pause_s)
        taking = time.perf_counter_ns()
        assert exchange.reduced() == (float(step),) * ROW
        took_us.append((time.perf_counter_ns() - taking + said - started) / 1000)
    own_us = (time.process_time() - cpu_s) / (steps - 10) * 1e6
    return statistics.median(took_us[10:]), own_us


def several_results(place: Path, steps: int) -> list[Result]:
    results = []
    for shape in SHAPES:
        name, world = f"{len(shape)} nodes of {shape[0]} ranks", sum(shape)
        ours, peer = (several_nodes(place, shape, way, steps, STEP_S) for way in ("first ranks", "all-reduce"))
        pages = several_nodes(place, (world,), "pages", steps, STEP_S)
        for at, what in ((0, "at one boundary"), (1, "processor for one step and rank")):
            all_reduce = "(peer: an all-reduce of all ranks)"
            results.append(Result(f"{name}: {what} {all_reduce}", ours[at], "us", peer=peer[at]))
            results.append(Result(f"{world} ranks of one node, by pages: {what}", pages[at], "us"))
        say(f"  {name}: first ranks {ours}, all-reduce {peer}, pages {pages}")
    for nodes in (2, 4, 8):
        name, shape = f"{nodes} nodes, nothing between the rounds (peer: gloo's all-reduce)", (1,) * nodes
        alone, peer = (several_nodes(place, shape, way, ROUNDS_ALONE, 0.0) for way in ("first ranks", "all-reduce"))
        results.append(Result(name, alone[0], "us", peer=peer[0]))
        say(f"  {nodes} nodes alone: first ranks {alone[0]}, all-reduce {peer[0]}")
    return results


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=count, default=6, help="blocks of six steps of each kind (default: 6)")
    parser.add_argument("--quick", action="store_true", help="run a few steps, only to see that the benchmark works")
    parser.add_argument("--only", choices=("one", "several"), help="one node alone, or several alone (needs no etcd)")
    options = parser.parse_args()
    results: list[Result] = []
    with workplace() as place:
        if options.only != "one":
            results += several_results(place, 20 if options.quick else STEPS)
        if options.only != "several":
            results = one_node(place, 2 if options.quick else options.rounds) + results
    report("sentinel", results, nvidia_resiliency_ext=version("nvidia-resiliency-ext") or "not installed")


if __name__ == "__main__":
    main()
