"""A training with three alternating kinds of steps: plain, with a session, and with a peer. `sentinel.py` starts this script on two ranks.

A step sleeps, computes a little and ends with an all-reduce, as in a training. The ways alternate in blocks of steps, forwards and
backwards. The first step of a block is dropped, because it contains work left from the previous block. Rank 0 prints one line: `sentinel`,
and a JSON object. The object has the microseconds of each step, by way and rank, and those of each boundary's parts. The parts are timed in
separate blocks, because timing them makes a boundary longer.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import distributed, nn

from mt_resilient import Session
from mt_resilient.resilience.ipc.board_layout import Page
from mt_resilient.training.boundary.allreduce import Sentinel
from mt_resilient.training.boundary.lineage import Course
from mt_resilient.training.boundary.step_metrics import Figures

STEP_S, COMPUTED_S, BLOCK = 0.1, 0.02, 6
APART = "apart"
PARTS = {
    "contribute": (Sentinel, "contribute", Sentinel.contribute),
    "take": (Sentinel, "take", Sentinel.take),
    "beat": (Page, "beat", Page.beat),
    "judge": (Course, "passes", Course.passes),
}
parts: defaultdict[str, list[float]] = defaultdict(list)


def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter_ns()
        try:
            return function(*args, **kwargs)
        finally:
            parts[name].append((time.perf_counter_ns() - started) / 1000)

    return wrapped


def tell_apart(on: bool) -> None:
    for name, (owner, method, function) in PARTS.items():
        setattr(owner, method, timed(name, function) if on else function)


def peer() -> Callable[[], None] | None:
    """Return the function that sends NVRx' heartbeat to its monitor process; None if NVRx is not installed. The heartbeat serves only hang
    detection."""
    try:
        from nvidia_resiliency_ext import fault_tolerance
    except ImportError:
        return None
    path = f"{mkdtemp(prefix='nvrx-')}/socket"
    os.environ["FT_RANK_MONITOR_IPC_SOCKET"] = path
    settings = fault_tolerance.FaultToleranceConfig()
    fault_tolerance.RankMonitorServer.run_in_subprocess(settings, path)
    client = fault_tolerance.RankMonitorClient()
    client.init_workload_monitoring()
    return client.send_heartbeat


def main() -> None:
    rounds = int(sys.argv[1])
    distributed.init_process_group("gloo")
    heartbeat = peer()
    session = Session(model=nn.Linear(16, 16))
    session.begin(0)
    done, took = 0, defaultdict[str, list[float]](list)

    def boundary() -> None:
        nonlocal done
        done += 1
        session.boundary(done, Figures(loss=2.0 + 0.001 * (done % 7), grad_norm=1.0))

    ways: dict[str, Callable[[], None]] = {"plain": lambda: None, "ours": timed("boundary", boundary), APART: boundary}
    if heartbeat is not None:
        ways["peer"] = timed("heartbeat", heartbeat)
    for _ in range(200):  # enough figures for the judgement of spikes
        boundary()
    parts.clear()
    matrix, ready = torch.randn(128, 128), torch.zeros(1)
    for number in range(rounds):
        for way in list(ways) if number % 2 else reversed(ways):
            tell_apart(way == APART)
            for place in range(BLOCK):
                started = time.perf_counter_ns()
                time.sleep(STEP_S - COMPUTED_S)
                until = time.perf_counter() + COMPUTED_S
                while time.perf_counter() < until:
                    torch.mm(matrix, matrix)
                distributed.all_reduce(ready)
                ways[way]()
                if place:
                    took[way].append((time.perf_counter_ns() - started) / 1000)
    session.finish()
    gathered: list[Any] = [None, None]
    distributed.all_gather_object(gathered, {"steps": took, "parts": parts})
    if distributed.get_rank() == 0:
        print("sentinel", json.dumps(gathered), flush=True)
    Path(os.environ.get("FT_RANK_MONITOR_IPC_SOCKET", "/nowhere")).unlink(missing_ok=True)
    distributed.destroy_process_group()
    os._exit(0)  # NVRx' monitor process would delay the interpreter's end


if __name__ == "__main__":
    main()
