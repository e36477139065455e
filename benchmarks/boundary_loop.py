"""Measure what a session's boundary (the work between two steps) costs its loop. `overhead.py` starts this script for two ranks under
`mt-resilient run`.

A step is 20 ms of arithmetic and an all-reduce. So the ranks exchange their figures while the loop computes, as in a training. Rank 0
prints one line: `boundary`, and a JSON list with the microseconds of each boundary of all ranks.
"""

from __future__ import annotations

import json
import time

import torch
from torch import distributed, nn

from mt_resilient import Session
from mt_resilient.resilience.inprocess.tally import Directive
from mt_resilient.training.boundary.step_metrics import Figures

STEPS, WARM_UP = 220, 20
STEP_S = 0.02


def main() -> None:
    distributed.init_process_group("gloo")
    session = Session(model=nn.Linear(16, 16))
    took_us: list[float] = []
    session.begin(0)
    matrix, ready = torch.randn(128, 128), torch.zeros(1)
    for step in range(1, STEPS + 1):
        until = time.perf_counter() + STEP_S
        while time.perf_counter() < until:
            torch.mm(matrix, matrix)
        distributed.all_reduce(ready)
        started = time.perf_counter_ns()
        directive = session.boundary(step, Figures(loss=2.0, grad_norm=1.0))
        took_us.append((time.perf_counter_ns() - started) / 1000)
        assert directive is Directive.GO_ON
    session.finish()
    gathered: list[list[float]] = [[], []]
    distributed.all_gather_object(gathered, took_us[WARM_UP:])
    if distributed.get_rank() == 0:
        print("boundary", json.dumps([us for rank in gathered for us in rank]), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
