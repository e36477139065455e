"""Measure the time from the SIGKILL of a rank to the first step of its successors: by a warm start, a cold start, and torchrun itself.

    python benchmarks/recovery.py [--repeats N] [--quick] [--device DEVICE]

The training is `examples/gpt/pretrain.py`: megatron-core, two data-parallel ranks, gloo, and 50 ms of sleep in each step. Each repeat runs
it three times, one after the other: behind `mt-resilient run` with a ready warm process, behind `mt-resilient run --no-warm`, and under
`torchrun --max-restarts 3`. Each time rank 1 is killed. The clock stops when the first step line of the new ranks arrives. torchrun's ranks
start from step 0 and restore nothing, which is to torchrun's advantage.

Predicted: 0.5 s for a warm start, and 4 to 5 s for a cold start and for torchrun.

Measured on two quiet cores (AMD EPYC), medians of three: warm 0.26 s, cold 2.12 s, torchrun 2.50 s (1.99 to 2.95 in six runs). So a warm
start takes 0.10 of torchrun's time, and a cold start 0.85 (1.01 in the previous run). The phases of the warm start in ms: detect 4, stop
38, start 54, build 53, restore 11, step 75 (50 of them are sleep). On 32 cores of another host, with an earlier version (torch 2.11 with
CUDA, two runs): warm 1.36 and 1.39 s, cold 13.5 and 14.5 s, torchrun 13.1 s.

With `--device`, the training is `device_loop.py` on two devices: first with a warm start, then under torchrun for as many steps. The losses
after the fault must equal, bit for bit, those of the same steps under torchrun before its fault.

Measured on two H200s (torch 2.11, two faults): 2.96 and 2.92 s (stop 1.1, start 0.1, build 1.2, restore 0.23, step 0.3), torchrun 13.2 s,
the script's own first start 17.3 and 20.2 s, the same bits in 204 steps. Another host of two H200s, before memory was registered early:
2.86 s (stop 0.95, restore 0.36), torchrun 8.4 s, the first start 12.6 s. Two H100s: 3.28 s, torchrun 13.4 s. The parts are in
docs/architecture.md.
"""

from __future__ import annotations

import math
import os
import select
import signal
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from jobs import DEVICE_LOOP, GPT, SIZES, Job, JobFailed, plain, workplace, wrapped
from measure import Result, arguments, count, median, report, say

WAYS = ("warm", "cold", "torchrun")
SCRIPT = (str(GPT), "--device", "cpu", "--steps", "1000000", "--step-delay", "0.05")
STEPS_BEFORE = 20
BACK_WITHIN_S = 120.0
LIMITS = {"warm": 0.12, "cold": 1.05}
"""The limits, as shares of torchrun's time. A cold start should take as long as torchrun, and these medians scatter by 5 %."""
AGAIN = 20
"""Steps after a fault whose losses are compared."""
SETTLE_S = 5.0
"""Seconds from the warm process's readiness to the fault on a device: by then, all slots' memory is registered."""
PARTS = ("main", "group", "model", "session", "step", "trains")
"""The times in `Job.stamps`. The first part is the device's context, the last one the first step."""
PHASES = ("detect", "stop", "start", "build", "restore", "step")

Figures = dict[str, float]
"""Seconds by name. `total`: the whole recovery. `gone` and `begun`: from the kill until the old ranks are gone, and until the first new
rank begins. The others are the phases of our incident record."""


def start(way: str, directory: Path, script: Sequence[str] = SCRIPT) -> Job:
    match way:
        case "warm":
            return wrapped(script, directory)
        case "cold":
            return wrapped(script, directory, "--no-warm")
    return plain(script, directory)


def measure(way: str, directory: Path) -> Figures:
    """Cause one fault, and return its figures. Raises JobFailed if the job does not recover."""
    job = start(way, directory)
    try:
        job.wait_for_steps(STEPS_BEFORE)
        if way == "warm":
            job.wait_for(job.warm_ready, 180.0, "the warm process")
        ranks = job.wait_for(job.rank_pids, 30.0, "the ranks")
        time.sleep(1.0)  # let the machine calm down after `status`
        figures = fault(job, ranks)
        if way != "torchrun":
            incident = job.wait_for(lambda: _closed(job), 60.0, "the end of the incident")
            say(f"  {way}: {incident['launch']}")
            figures |= {phase: incident["phases_s"][phase] for phase in PHASES}
        return figures
    finally:
        job.stop()


def fault(job: Job, ranks: list[int]) -> Figures:
    """Kill the last rank, and measure the recovery. Rank 0 prints the lines. Lines that arrive after its end come from the new ranks."""
    speaker = os.pidfd_open(ranks[0])
    killed_s = time.monotonic()
    os.kill(ranks[-1], signal.SIGKILL)
    if not select.select([speaker], [], [], BACK_WITHIN_S)[0]:
        raise JobFailed("rank 0 survives the death of rank 1")
    gone_s = time.monotonic()
    os.close(speaker)
    time.sleep(0.02)  # by then its last lines are through the pipe, and no new rank has printed yet
    known = len(job.steps)
    job.wait_for(lambda: len(job.steps) > known, BACK_WITHIN_S, "the first step after the fault")
    first = job.steps[known]
    fresh = job.wait_for(lambda: _others(job, ranks), 30.0, "the new ranks")
    return {"total": first.at_s - killed_s, "gone": gone_s - killed_s, "begun": min(map(_began_s, fresh)) - killed_s}


def _others(job: Job, old: list[int]) -> list[int]:
    now = job.rank_pids()
    return now if not set(now) & set(old) else []


def _began_s(pid: int) -> float:
    """Return when a process began, on the monotonic clock. The kernel records it on the boot clock, which also runs while the machine
    sleeps."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    asleep_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    return ticks / os.sysconf("SC_CLK_TCK") - asleep_s


def _closed(job: Job) -> dict[str, Any] | None:
    told = [line["incident"] for line in job.journal() if line["kind"] == "incident"]
    return told[-1] if told and not told[-1]["open"] else None


def device_figures(place: Path, kind: str, repeat: int) -> dict[str, Figures]:
    """Return the figures of one fault under `mt-resilient run`, and of one under torchrun: those of `measure`; `first`, seconds from the
    command to the first step; and seconds of each part of the start after the fault, as the script sees them."""
    found: dict[str, Figures] = {}
    losses: dict[str, dict[str, str]] = {"warm": {}, "torchrun": {}}
    for way in losses:
        job, figures = start(way, place / f"{way}{repeat}", (DEVICE_LOOP, kind, *SIZES[kind], "1000000")), Figures()
        try:
            job.wait_for_steps(STEPS_BEFORE)
            figures["first"] = job.steps[0].at_s - job.began_s
            if way == "warm":
                job.wait_for(job.warm_ready, 180.0, "the warm process")
                time.sleep(SETTLE_S)
            else:
                job.wait_for_steps(1 + max(map(int, losses["warm"])))
            losses[way] = _losses(job)
            known = len(job.stamps())
            figures |= fault(job, job.wait_for(job.rank_pids, 30.0, "the ranks"))
            job.wait_for(lambda job=job, known=known: len(job.stamps()) > known + 1, 30.0, "the ranks' times")
            for part, after in pairwise(PARTS):
                figures[f"script: {part}"] = max(one[after] - one[part] for one in job.stamps()[known:])
            if way == "warm":
                figures |= job.wait_for(lambda job=job: _closed(job), 60.0, "the end of the incident")["phases_s"]
                job.wait_for_steps(len(job.steps) + AGAIN)
                losses[way] = _losses(job)
        except JobFailed as error:
            say(f"  {way}, repeat {repeat}: {error}")
        finally:
            job.stop()
        found[way] = figures
        say(f"  {way}, repeat {repeat}: " + ", ".join(f"{name} {1000 * each:.0f} ms" for name, each in figures.items()))
    common = losses["warm"].keys() & losses["torchrun"].keys()
    differ = sum(losses["warm"][step] != losses["torchrun"][step] for step in common)
    say(f"  repeat {repeat}: of {len(common)} steps, {differ} have other losses than under torchrun")
    found["warm"]["differ"] = differ if common else math.inf
    return found


def _losses(job: Job) -> dict[str, str]:
    """Return the bits of the loss by step, as the last line of each step has them."""
    return {line.split()[1]: line.split()[2] for line in [*job.lines] if line.startswith("step ")}


def device_results(measured: list[dict[str, Figures]], kind: str) -> list[Result]:
    def middle(way: str, name: str) -> float | None:
        return median([one[way][name] for one in measured if name in one.get(way, {})])

    peer, first = middle("torchrun", "total"), middle("torchrun", "first")
    total, differ = middle("warm", "total"), [one["warm"]["differ"] for one in measured]
    parts = [name for name in measured[0]["warm"] if name.startswith("script: ")]
    return [
        Result(f"SIGKILL to first step on {kind}", total, "s", peer=peer, limit=3.0, target="<= 3 s"),
        Result("the same, against the script's own first start", total, "s", first, first and 0.2 * first, "<= 0.2 x"),
        Result("steps with other losses than torchrun's", max(differ), "steps", limit=0.0, target="none"),
        *[Result(f"phase {name}", middle("warm", name), "s") for name in PHASES],
        *[Result(f"in build, {name}", middle("warm", name), "s", middle("torchrun", name)) for name in parts],
    ]


def results(measured: dict[str, list[Figures]]) -> list[Result]:
    def middle(way: str, name: str) -> float | None:
        return median([figures[name] for figures in measured[way] if name in figures])

    peer = middle("torchrun", "total")
    rows = []
    for way, share in LIMITS.items():
        limit, target = None if peer is None else share * peer, f"<= {share} x torchrun --max-restarts"
        total = middle(way, "total")
        rows.append(Result(f"SIGKILL to first step, {way}", total, "s", peer=peer, limit=limit, target=target))
    outside = {"gone": "SIGKILL to old ranks gone", "begun": "SIGKILL to first new rank begun"}
    for way in ("warm", "cold"):
        for name, text in outside.items():
            rows.append(Result(f"{text}, {way}", middle(way, name), "s", peer=middle("torchrun", name)))
        rows += [Result(f"phase {phase}, {way}", middle(way, phase), "s") for phase in PHASES]
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=count, default=3, help="number of faults for each kind of start (default: 3)")
    parser.add_argument(
        "--quick", action="store_true", help="cause one fault each, only to see that the benchmark works"
    )
    parser.add_argument("--device", choices=SIZES, help="measure a training on two of these devices instead")
    options = parser.parse_args()
    if options.device:
        with workplace() as place:
            repeats = range(1 if options.quick else options.repeats)
            measured_there = [device_figures(place, options.device, repeat) for repeat in repeats]
        report("recovery", device_results(measured_there, options.device))
        return
    measured: dict[str, list[Figures]] = {way: [] for way in WAYS}
    with workplace() as place:
        for repeat in range(1 if options.quick else options.repeats):
            for way in WAYS:
                try:
                    figures = measure(way, place / f"{way}{repeat}")
                except JobFailed as error:
                    say(f"  {way}, repeat {repeat}: not counted, {error}")
                    continue
                measured[way].append(figures)
                told = ", ".join(f"{name} {1000 * seconds:.0f}" for name, seconds in figures.items())
                say(f"  {way}, repeat {repeat}: {told} ms; load {os.getloadavg()[0]:.1f}")
    report("recovery", results(measured))


if __name__ == "__main__":
    main()
