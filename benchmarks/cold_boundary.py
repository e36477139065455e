"""What a boundary costs where a step has emptied the caches, on one core and without waiting: two versions in turn, in one process.

    python benchmarks/cold_boundary.py [--steps N] [--against CHECKOUT]

Instead of 100 ms of other work, 64 MB of memory are touched between two boundaries. A rank of two, whose peer says what it says itself; no
snapshot is due; loss and norm scatter as a training's. `--against` takes the program of another checkout as the peer. Beside the
microseconds: the function calls and byte codes of a warm boundary, which no neighbour disturbs.

Measured: see docs/scaling.md, "The price on one node".
"""

from __future__ import annotations

import argparse
import gc
import mmap
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from types import FrameType
from typing import Any

import numpy as np
import torch
from measure import Result, program, report

ROOT = Path(__file__).resolve().parent.parent
TOUCHED_BYTES = 64 << 20
PAGE_BYTES = 4096
WARM_UP, COUNTED = 200, 64
NEVER = 10**9


class Way:
    """A session of one version of the program, loaded as a package with its own name."""

    def __init__(self, name: str, root: Path) -> None:
        of = program(name, root)
        attach, boundary = of("training.attach.attach"), of("resilience.inprocess.tally")
        self._board = memoryview(mmap.mmap(-1, 2 * PAGE_BYTES))
        pages = [of("resilience.ipc.board_layout").Page(self._board[at : at + PAGE_BYTES]) for at in (0, PAGE_BYTES)]
        for rank, page in enumerate(pages):
            page.clear(1, rank)
            page.pid = os.getpid()
        slots = of("checkpoint.arena.arena").create(2, 3)
        handoff = of("resilience.ipc.handoff").Handoff(
            generation=1, board="", arena=of("checkpoint.arena.arena").paths(slots, os.getpid()),
            snapshots=mkdtemp(prefix="cold-"), resume_step=-1, replay_until=-1, origin="", every_steps=NEVER,
            durable_every_steps=NEVER, reach_steps=100, policy=boundary.RankPolicy(), turns=(), windows=(), modules="/dev/null",
        )  # fmt: skip
        attach._attached[os.getpid()] = attach.Attachment(handoff=handoff, page=pages[0], rank=0, local_rank=0, world=2)
        self._session = of("training.session").Session(model=torch.nn.Linear(16, 16))
        attach._attached.clear()
        self._session.begin(0)
        self._session._council._sentinel._exchange = of("training.boundary.allreduce").Pages(pages[0], pages)
        self._figures, self._go_on = of("training.boundary.step_metrics").Figures, boundary.Directive.GO_ON
        self._chance, self._step = random.Random(1), 0

    def boundary(self, around: Callable[[Callable[[], Any]], Any]) -> Any:
        """Run the boundary of one more step. `around` gets the function to be measured."""
        self._step += 1
        loss = 2 + 3 * (self._step + 100) ** -0.3 + 0.05 * self._chance.gauss(0, 1)
        figures = self._figures(loss, 1 + abs(self._chance.gauss(0, 1)))
        found = around(lambda: self._session.boundary(self._step, figures))
        self._board[PAGE_BYTES + 1344 : PAGE_BYTES + 1600] = self._board[1344:1600]  # the peer's row is a copy of ours
        return found


def timed(act: Callable[[], Any]) -> float:
    began = time.perf_counter_ns()
    act()
    return (time.perf_counter_ns() - began) / 1000


def calls(act: Callable[[], Any]) -> int:
    count = 0

    def seen(_: FrameType, event: str, __: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    act()
    sys.setprofile(None)
    return count


def codes(act: Callable[[], Any]) -> int:
    count = 0

    def seen(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return seen

    sys.settrace(seen)
    act()
    sys.settrace(None)
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--against", type=Path, help="root of another checkout")
    options = parser.parse_args()
    torch.set_num_threads(1)
    roots = {"ours": ROOT} | ({"peer": options.against.resolve()} if options.against else {})
    ways = {name: Way(f"mt_{name}", root) for name, root in roots.items()}
    for way in ways.values():
        for _ in range(WARM_UP):
            way.boundary(timed)
    memory, took = np.zeros(TOUCHED_BYTES // 8), {name: list[float]() for name in ways}
    gc.disable()
    for turn in range(options.steps):
        for name in list(ways) if turn % 2 else reversed(ways):
            memory += 1.0
            took[name].append(ways[name].boundary(timed))
    figures: dict[str, dict[str, float]] = {"median": {}, "mean of all but the slowest 5 %": {}}
    for name, us in took.items():
        figures["median"][name] = statistics.median(us)
        figures["mean of all but the slowest 5 %"][name] = statistics.fmean(sorted(us)[: int(0.95 * len(us))])
    results = [
        Result(name=f"a boundary, caches cold: {what}", ours=by["ours"], peer=by.get("peer"), unit="us")
        for what, by in figures.items()
    ]
    for what, count in (("function calls", calls), ("byte codes", codes)):
        by = {name: statistics.fmean(way.boundary(count) for _ in range(COUNTED)) for name, way in ways.items()}
        results.append(Result(name=f"a boundary: {what}", ours=by["ours"], peer=by.get("peer"), unit="1"))
    report("cold_boundary", results, against=str(options.against.name) if options.against else "nothing")


if __name__ == "__main__":
    main()
