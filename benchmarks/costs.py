"""Measure the cost of one save and one load for a training loop, for any peer of `snapshot.py`. All results are in seconds."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from peer import AsyncPeer, Peer, Saving, drop_cached
from states import State

from mt_resilient.training import device

Costs = dict[str, float]
ALONE = 6
"""The number of steps without a save, both before the save and after it."""
KEPT = 8
"""The number of steps with a snapshot in memory."""


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class Work:
    """The arithmetic of a training step: matrix products on the used device. Each step waits for them, like a loop that prints its loss."""

    def __init__(self, kind: str, step_s: float) -> None:
        """step_s: the approximate seconds of a step."""
        dtype = torch.float32 if kind == "cpu" else torch.bfloat16
        self._products = 1
        for size in (1024, 2048, 4096, 8192):
            self._factor = torch.randn(size, size).to(kind, dtype)
            if self._fastest() > 0.001:
                break
        for _ in range(2):  # the first products of a process are slow
            self._products = max(1, round(self._products * step_s / self._fastest()))

    def _fastest(self) -> float:
        self.step()
        return min(timed(self.step) for _ in range(3))

    def step(self) -> None:
        for _ in range(self._products):
            torch.mm(self._factor, self._factor)
        if self._factor.device.type != "cpu":  # wait for the loop's stream only: copies on other streams continue
            device.module(self._factor.device.type).current_stream().synchronize()


def saved(peer: Peer, state: State, directory: Path) -> Costs:
    """Return the costs of a save. stall: seconds in the call. staged: seconds until the state may be changed. durable: seconds until all
    data are on disk."""
    device.synchronize(state.values())
    os.sync()
    started = time.perf_counter()
    if not isinstance(peer, AsyncPeer):
        peer.save(state, directory)
        return dict.fromkeys(("stall", "staged", "durable"), time.perf_counter() - started)
    saving = peer.save_async(state, directory)
    stall_s = time.perf_counter() - started
    saving.staged()
    staged_s = time.perf_counter() - started
    saving.done()
    return {"stall": stall_s, "staged": staged_s, "durable": time.perf_counter() - started}


def restored(peer: Peer, into: State, directory: Path) -> float:
    """Return the seconds to load files that this kernel does not cache. The load fills live tensors that contain other values."""
    for tensor in into.values():
        tensor.fill_(7)
    drop_cached(directory)
    device.synchronize(into.values())

    def load() -> None:
        peer.load(into, directory)
        device.synchronize(into.values())

    return timed(load)


def trained(peer: AsyncPeer, state: State, directory: Path, work: Work) -> Costs:
    """Return the costs of a save during training steps. lost: training time lost over the steps until the save is durable. slower: the time
    of a step during the save, divided by that of a step without. slower staging: the same for the first step, during which the state is
    staged. train stall: seconds in the call, between steps. Steps without a save are timed before and after, because a busy device changes
    its clock rate."""
    work.step()
    os.sync()
    alone = [timed(work.step) for _ in range(ALONE)]
    started = time.perf_counter()
    saving = peer.save_async(state, directory)
    stall_s = time.perf_counter() - started
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            saving.done()
        except BaseException as error:
            failed.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    beside: list[float] = []
    while waiting.is_alive() or len(beside) < 2:
        before = time.perf_counter()
        work.step()
        (saving.before_update or saving.staged)()
        saving.boundary()
        beside.append(time.perf_counter() - before)
    total_s = time.perf_counter() - started
    waiting.join()
    if failed:
        raise failed[0]
    os.sync()
    alone += [timed(work.step) for _ in range(ALONE)]
    step_s = statistics.median(alone)
    return {
        "train stall": stall_s,
        "lost": total_s - len(beside) * step_s,
        "slower": statistics.median(beside[1:]) / step_s,
        "slower staging": beside[0] / step_s,
        "step": step_s,
    }


def kept(keep: Callable[[], Saving], work: Work) -> list[Costs]:
    """Return train stall and slower staging, as in `trained`, for each of several snapshots in memory only, one in each step."""
    work.step()
    alone, found = [timed(work.step) for _ in range(ALONE)], []
    for _ in range(KEPT):
        started = time.perf_counter()
        saving = keep()
        recorded = time.perf_counter()
        work.step()
        (saving.before_update or saving.staged)()
        found.append((recorded - started, time.perf_counter() - recorded))
        saving.boundary()
    alone += [timed(work.step) for _ in range(ALONE)]
    step_s = statistics.median(alone)
    return [{"train stall": stall_s, "slower staging": took_s / step_s} for stall_s, took_s in found]
