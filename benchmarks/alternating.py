"""Run two jobs alternately, one at a time. Each measurement of one job has a counterpart of the other job, taken one second apart."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import psutil
from jobs import Job

SLICE_S, SETTLE_S = 1.0, 0.2
QUIET_CORES = 0.2
"""The most cores that the rest of the machine may use in each slice of a quiet round."""


@dataclass(frozen=True)
class Slice:
    times_s: list[float]
    """The step times, without those of the slice's first moments."""
    foreign_cores: float
    """CPU seconds per second that everything except the job used in this slice. Other guests on the same host are included."""


class Alternating:
    """One of two jobs. They are stopped and continued alternately."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.tree = job.tree()
        pids = set(job.wait_for(job.rank_pids, 30.0, "the ranks"))
        self.ranks = [process for process in self.tree if process.pid in pids]
        self.rest = [process for process in self.tree if process.pid not in pids]
        self.slices: list[Slice] = []
        self.finished = 0
        self.ran_s = self.rank_cpu_s = self.rest_cpu_s = 0.0
        self.halt()

    def halt(self) -> None:
        self._signal(signal.SIGSTOP)

    def run_a_slice(self) -> None:
        known, started, before = len(self.job.steps), time.monotonic(), self._clocks()
        self._signal(signal.SIGCONT)
        time.sleep(SLICE_S)
        self.halt()
        ran_s = time.monotonic() - started
        ranks_s, rest_s, all_s = (now - then for now, then in zip(self._clocks(), before, strict=True))
        time.sleep(0.02)  # let the last lines arrive
        fresh = self.job.steps[known:]
        settled = [line.at_s for line in fresh if line.at_s > started + SETTLE_S]
        times_s = [after - before for before, after in pairwise(settled)]
        self.slices.append(Slice(times_s, (all_s - ranks_s - rest_s) / ran_s))
        self.finished += len(fresh)
        self.ran_s += ran_s
        self.rank_cpu_s += ranks_s
        self.rest_cpu_s += rest_s

    @property
    def times_s(self) -> list[float]:
        return [seconds for one in self.slices for seconds in one.times_s]

    @property
    def rank_cpu_per_step_s(self) -> float:
        return self.rank_cpu_s / max(1, self.finished)

    @property
    def other_cpu_cores(self) -> float:
        """Return the number of cores that launcher, agent, etcd, warm and drain process used together while the job ran."""
        return self.rest_cpu_s / self.ran_s

    def _clocks(self) -> tuple[float, float, float]:
        """Return the CPU seconds so far of the ranks, of the job's other processes, and of the whole machine."""
        machine = psutil.cpu_times()
        idle = machine.idle + machine.iowait + machine.guest + machine.guest_nice  # user and nice include the guests
        return _cpu_s(self.ranks), _cpu_s(self.rest), sum(machine) - idle

    def _signal(self, number: int) -> None:
        for process in self.tree:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


@dataclass(frozen=True)
class Round:
    """Two slices of each job, directly after each other."""

    ratio: float
    """Step time with the runtime, divided by step time without."""
    quiet: bool


@dataclass
class Comparison:
    with_it: Alternating
    without: Alternating
    rounds: list[Round] = field(default_factory=list)

    def run_a_round(self) -> None:
        for turn in (self.with_it, self.without, self.without, self.with_it):
            turn.run_a_slice()
        ours, peer = self.with_it.slices[-2:], self.without.slices[-2:]
        times = [[seconds for one in slices for seconds in one.times_s] for slices in (ours, peer)]
        if all(times):
            quiet = all(one.foreign_cores <= QUIET_CORES for one in (*ours, *peer))
            self.rounds.append(Round(statistics.median(times[0]) / statistics.median(times[1]), quiet))
