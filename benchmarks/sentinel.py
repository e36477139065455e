"""What the ranks' word at each boundary costs a training, on one node and on several.

    python benchmarks/sentinel.py [--rounds N] [--quick] [--only one|several]

One node: steps of 100 ms on two ranks (`sentinel_loop.py`), in one run and in turn: plain, with a session's boundary after each, and with
the heartbeat of NVIDIA's resiliency extension 0.4.1 to its monitor, which pays for hang detection alone (left out where it is not on the
PYTHONPATH: put it into a directory of its own, for Megatron 0.17.1 does not start beside this version). Side by side: the boundary itself,
which is on the critical path, and paired differences of whole steps, whose scatter is larger than what is looked for. No snapshot is due.

Several nodes: processes of this machine with a board for each of so many nodes, 100 ms asleep between saying and taking: what each rank
spends in both, and the processor time of a step and rank, by the first rank of each node (`training/boundary/cross_node.py`) and by an
all-reduce of all ranks. On two cores, 16 processes share them: what is told is an upper bound. Alone: rounds of the nodes with nothing
between them.

Predicted: 0.1 ms a boundary on one node; by the first ranks less than by an all-reduce, since only one rank of a node has threads that want
a core.

Measured: see docs/scaling.md. The target of 0.1 ms was missed at steps of 100 ms, which leave the caches cold; `cold_boundary.py` has what
was done about it.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist
from jobs import REPOSITORY, workplace, wrapped
from measure import Result, report, say

from mt_resilient.resilience.inprocess.tally import ROW
from mt_resilient.resilience.ipc.board_events import PAGE_BYTES
from mt_resilient.resilience.ipc.board_layout import Page
from mt_resilient.training.boundary.allreduce import Exchange, Group, Nodes, Pages
from mt_resilient.training.boundary.cross_node import Rounds

NEVER = ("--snapshot-every", "1000000000", "--durable-every", "1000000000")
LIMIT_US = 100.0
SHAPES = ((2, 2), (4, 4, 4, 4), (2,) * 8)
"""The number of ranks of each node."""
STEP_S, STEPS, ROUNDS_ALONE = 0.1, 40, 500


def one_node(place: Path, rounds: int) -> list[Result]:
    job = wrapped(
        [str(REPOSITORY / "benchmarks" / "sentinel_loop.py"), str(rounds)], place / "one", "--no-warm", *NEVER
    )
    try:
        job.wait_for(lambda: any(line.startswith("sentinel ") for line in job.lines), 60 + 3 * rounds, "the steps")
        line = next(line for line in job.lines if line.startswith("sentinel "))
    finally:
        job.stop()
    ranks = json.loads(line.removeprefix("sentinel "))
    boundary = [us for rank in ranks for us in rank["parts"]["boundary"]]
    peer = "peer" in ranks[0]["steps"]
    results = [
        Result(
            name="one boundary, steps of 100 ms", ours=statistics.median(boundary), limit=LIMIT_US, unit="us",
            target="<= 0.1 ms on the critical path",
        ),
        Result(
            name="step with less step without, median of pairs", ours=_paired(ranks, "ours"),
            peer=_paired(ranks, "peer") if peer else None, unit="us",
        ),
    ]  # fmt: skip
    if peer:
        heartbeat = [us for rank in ranks for us in rank["parts"]["heartbeat"]]
        results.append(
            Result(name="one NVRx heartbeat", ours=None, peer=statistics.median(heartbeat), unit="us")
        )  # of its own client, to its own monitor
    for part in ("contribute", "take", "judge", "beat"):
        results.append(
            Result(
                name=f"  of which {part}", ours=statistics.median(u for r in ranks for u in r["parts"][part]), unit="us"
            )
        )
    return results


def _paired(ranks: Sequence[dict], way: str) -> float:
    """Return the median difference of paired steps. Steps are paired block by block, in the order in which they ran."""
    differences = [a - b for rank in ranks for a, b in zip(rank["steps"][way], rank["steps"]["plain"], strict=True)]
    return statistics.median(differences)


def several_nodes(place: Path, shape: Sequence[int], way: str, steps: int, pause_s: float) -> tuple[float, float]:
    """Return two figures in microseconds: the median time of all ranks at a boundary, and the processor time of one step on one rank."""
    world = sum(shape)
    memory, told = mmap.mmap(-1, world * PAGE_BYTES), mmap.mmap(-1, world * 16)
    store = place / f"store-{way}-{'-'.join(map(str, shape))}-{pause_s}"
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                pages = [Page(memoryview(memory)[n * PAGE_BYTES : (n + 1) * PAGE_BYTES]) for n in range(world)]
                figures = _rank(_exchange(way, shape, rank, pages, store), rank, steps, pause_s)
                memoryview(told).cast("d")[2 * rank : 2 * rank + 2] = memoryview(figures).cast("B").cast("d")
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    for child in children:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    figures = memoryview(told).cast("d").tolist()
    return statistics.median(figures[::2]), statistics.fmean(figures[1::2])


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


def _rank(exchange: Exchange, rank: int, steps: int, pause_s: float) -> memoryview:
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
    return memoryview(torch.tensor([statistics.median(took_us[10:]), own_us], dtype=torch.float64).numpy())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="blocks of six steps of each way")
    parser.add_argument("--quick", action="store_true", help="a few steps, only to see that it works")
    parser.add_argument(
        "--only", choices=("one", "several"), help="one node alone, or several alone (which wants no etcd)"
    )
    options = parser.parse_args()
    steps = 20 if options.quick else STEPS
    results: list[Result] = []
    with workplace() as place:
        for shape in SHAPES if options.only != "one" else ():
            name = f"{len(shape)} nodes of {shape[0]} ranks"
            figures = {way: several_nodes(place, shape, way, steps, STEP_S) for way in ("first ranks", "all-reduce")}
            pages = several_nodes(place, (sum(shape),), "pages", steps, STEP_S)
            for at, what in ((0, "at one boundary"), (1, "processor for one step and rank")):
                results.append(
                    Result(
                        name=f"{name}: {what} (peer: an all-reduce of all ranks)", ours=figures["first ranks"][at],
                        peer=figures["all-reduce"][at], unit="us",
                    )
                )  # fmt: skip
                results.append(
                    Result(name=f"{sum(shape)} ranks of one node, by pages: {what}", ours=pages[at], unit="us")
                )
            say(f"  {name}: {figures}, pages {pages}")
        for nodes in (2, 4, 8) if options.only != "one" else ():
            alone = {
                way: several_nodes(place, (1,) * nodes, way, ROUNDS_ALONE, 0.0)[0]
                for way in ("first ranks", "all-reduce")
            }
            results.append(
                Result(
                    name=f"{nodes} nodes, nothing between the rounds (peer: gloo's all-reduce)", ours=alone["first ranks"],
                    peer=alone["all-reduce"], unit="us",
                )
            )  # fmt: skip
            say(f"  {nodes} nodes alone: {alone}")
        if options.only != "several":
            results = one_node(place, 2 if options.quick else options.rounds) + results
    try:
        peer = metadata.version("nvidia-resiliency-ext")
    except metadata.PackageNotFoundError:
        peer = "not installed"
    report("sentinel", results, nvidia_resiliency_ext=peer)


if __name__ == "__main__":
    main()
