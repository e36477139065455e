"""Measure a boundary after a step that has emptied the processor's caches. The benchmark runs on one core and never waits.

    python benchmarks/cold_boundary.py [--steps N]

Instead of 100 ms of other work, the process touches 64 MB of memory between two boundaries. The process is one of two ranks. The other
rank's row is a copy of its own row. No snapshot is due. Loss and gradient norm vary from step to step as in a training. The benchmark also
counts the function calls and byte codes of a warm boundary, which other work on the machine does not change.

Measured: docs/scaling.md, "The price on one node".
"""

from __future__ import annotations

import gc
import mmap
import os
import random
import statistics
import sys
from collections.abc import Callable
from tempfile import mkdtemp
from types import FrameType
from typing import Any

import numpy as np
import torch
from jobs import handoff
from measure import Result, arguments, count, report, timed

from mt_resilient.checkpoint.arena import arena
from mt_resilient.resilience.ipc.board_events import PAGE_BYTES
from mt_resilient.resilience.ipc.board_layout import Page
from mt_resilient.training.attach import attach
from mt_resilient.training.boundary.allreduce import Pages
from mt_resilient.training.boundary.step_metrics import Figures
from mt_resilient.training.session import Session

TOUCHED_BYTES = 64 << 20
WARM_UP, COUNTED = 200, 64
NEVER = 10**9
ROW = slice(1344, 1600)
"""Where a rank's page of the board has its row."""


class Rank:
    """A session with its page of a board, and the page of a peer."""

    def __init__(self) -> None:
        memory = memoryview(mmap.mmap(-1, 2 * PAGE_BYTES))
        self._ours, self._peers = memory[:PAGE_BYTES], memory[PAGE_BYTES:]
        pages = [Page(self._ours), Page(self._peers)]
        for rank, page in enumerate(pages):
            page.clear(1, rank)
        place = mkdtemp(prefix="cold-")
        given = handoff(
            arena=arena.paths(arena.create(2, 3), os.getpid()), snapshots=place, modules=f"{place}/modules",
            every_steps=NEVER, durable_every_steps=NEVER,
        )  # fmt: skip
        attach._attached[os.getpid()] = attach.Attachment(handoff=given, page=pages[0], rank=0, local_rank=0, world=2)
        pages[0].pid = os.getpid()
        self._session = Session(model=torch.nn.Linear(16, 16))
        self._session.begin(0)
        self._session._council._sentinel._exchange = Pages(pages[0], pages)
        self._chance, self._step = random.Random(1), 0

    def boundary(self, around: Callable[[Callable[[], object]], float]) -> float:
        """Run the boundary of one more step. `around` gets the function to be measured."""
        self._step += 1
        loss = 2 + 3 * (self._step + 100) ** -0.3 + 0.05 * self._chance.gauss(0, 1)
        figures = Figures(loss, 1 + abs(self._chance.gauss(0, 1)))
        found = around(lambda: self._session.boundary(self._step, figures))
        self._peers[ROW] = self._ours[ROW]
        return found


def calls(act: Callable[[], object]) -> int:
    count = 0

    def seen(_: FrameType, event: str, __: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    act()
    sys.setprofile(None)
    return count


def codes(act: Callable[[], object]) -> int:
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
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=count, default=500, help="number of boundaries (default: 500)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, memory, took_us = Rank(), np.zeros(TOUCHED_BYTES // 8), []
    for _ in range(WARM_UP):
        rank.boundary(timed)
    gc.disable()
    for _ in range(options.steps):
        memory += 1.0
        took_us.append(1e6 * rank.boundary(timed))
    usual = sorted(took_us)[: max(1, int(0.95 * len(took_us)))]
    results = [
        Result("a boundary, caches cold: median", statistics.median(took_us), "us"),
        Result("a boundary, caches cold: mean of all but the slowest 5 %", statistics.fmean(usual), "us"),
    ]
    for what, counted in (("function calls", calls), ("byte codes", codes)):
        results.append(
            Result(f"a boundary: {what}", statistics.fmean(rank.boundary(counted) for _ in range(COUNTED)), "1")
        )
    report("cold_boundary", results)


if __name__ == "__main__":
    main()
