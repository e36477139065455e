"""Measure what snapshots cost a training, in memory and on disk, and how fast they are written.

    python benchmarks/snapshot.py [--device cuda] [--mib N] [--cycles N] [--directory DIR]

One rank trains a model of linear layers with AdamW (`snapshot_loop.py`) behind `mt-resilient run`, in two jobs: one takes a snapshot in
memory every 8 steps, the other writes one to disk every 40 steps. A cycle is the steps from one snapshot to the next. For each step of a
cycle, the benchmark takes the median over all cycles. The median of these medians is the time of a step without a snapshot. The cost of a
snapshot is the sum of the amounts by which the medians exceed it. The first four cycles are not counted, because the slots' memory is
prepared in them. On a busy machine the medians scatter, and the computed cost is too large.

The drain process reports the time of the write. The peer is a single stream of direct I/O that writes as many bytes into the same folder.

An earlier form of this benchmark measured 7690 MiB on one H200 (16 cores, torch 2.11.0): a snapshot in memory held the loop for 3.7 ms and
made the next step 0.3 % longer, at a step of 254 ms (target: 3 ms). A snapshot on disk cost 30 ms in all. The write took 3.53 s, direct I/O
5.06 s. On two quiet cores (AMD EPYC) with 1474 MiB, a snapshot on disk cost 0.61 s. Its write took 0.85 s, direct I/O 0.90 s.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from statistics import median

from jobs import REPOSITORY, workplace, wrapped
from measure import Result, arguments, count, report, say, timed

MEMORY_EVERY, DISK_EVERY = 8, 40
LEFT_OUT = 4
BLOCK_BYTES = 16 << 20
GIB = 1 << 30


def measure(place: Path, device: str, mib: int, every: int, steps: int, *options: str) -> tuple[float, list[dict]]:
    """Return the seconds that one snapshot costs, and the drain process's reports. every: steps from one snapshot to the next."""
    script = [str(REPOSITORY / "benchmarks" / "snapshot_loop.py"), device, str(mib), str(steps)]
    job = wrapped(script, place, "--no-warm", *options, ranks=1)
    try:
        took_s = job.wait_for_figures("steps", 3600.0)
        events = [line["event"] for line in job.journal() if line["kind"] == "drain"]
    finally:
        job.stop()
    took_s = took_s[LEFT_OUT * every :]
    cycle = [median(took_s[at::every]) for at in range(every)]
    say(
        f"  {' '.join(options)}: a step takes {1000 * median(cycle):.1f} ms, a snapshot {1000 * excess(cycle):.1f} ms more"
    )
    return excess(cycle), [event for event in events if event["event"] == "durable"]


def excess(cycle: list[float]) -> float:
    return sum(cycle) - len(cycle) * median(cycle)


def write_raw(file: Path, nbytes: int) -> float:
    """Return the seconds to write a new file in one stream past the page cache, fsync included."""
    with mmap.mmap(-1, BLOCK_BYTES) as block:
        block[:] = os.urandom(BLOCK_BYTES)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)

        def write() -> None:
            for _ in range(max(1, nbytes // BLOCK_BYTES)):
                os.write(descriptor, block)
            os.fsync(descriptor)

        try:
            return timed(write)
        finally:
            os.close(descriptor)
            file.unlink()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", "musa"), help="where the model is")
    parser.add_argument("--mib", type=count, help="size of the state (default: 1474 on the CPU, 8192 on a device)")
    parser.add_argument("--cycles", type=count, default=6, help="number of snapshots that are measured (default: 6)")
    parser.add_argument("--directory", type=Path, help="a folder on the disk to measure (default: a temporary one)")
    options = parser.parse_args()
    if options.directory and not options.directory.is_dir():
        parser.error(f"there is no folder {options.directory}")
    device, mib = options.device, options.mib or (1474 if options.device == "cpu" else 8192)
    results = []
    with workplace(options.directory) as place:
        for name, every in (("memory", MEMORY_EVERY), ("disk", DISK_EVERY)):
            durable = every if name == "disk" else 10**9
            flags = ("--snapshot-every", str(every), "--durable-every", str(durable))
            steps = (LEFT_OUT + options.cycles) * every + 2
            cost_s, written = measure(place / name, device, mib, every, steps, *flags)
            limit_s, target = (0.003, "<= 3 ms") if device != "cpu" else (None, None)
            if name == "disk":
                limit_s, target = 0.1 * mib * (1 << 20) / GIB, "<= 0.1 s a GiB"
            results.append(Result(f"cost of a snapshot, {name}", cost_s, "s", limit=limit_s, target=target))
        nbytes = max((event["bytes"] for event in written), default=0)
        raw_s = median(write_raw(place / "raw", nbytes) for _ in range(3))
        write_s = median(event["seconds"] for event in written) if written else None
        target = "<= 1.1 x raw direct write"
        results.append(Result("write of a snapshot to disk", write_s, "s", raw_s, 1.1 * raw_s, target))
    report("snapshot", results)


if __name__ == "__main__":
    main()
