"""What a snapshot costs a training: ours, its peers, and the limits that nobody beats, side by side.

    python benchmarks/snapshot.py [--device cuda] [--mib N] [--rounds N] [--only NAME …] [--directory DIR] [--tmpfs DIR]

A state like that of a transformer under mixed precision (592 tensors) is saved to one disk by each in turn, in rounds whose order is drawn
anew; the limits (as many bytes in one stream of direct I/O, and over the device's link) are taken in the same round, right before or after
ours. Measured for each, in seconds: `stall`, the loop is in the call; `staged`, the state may be changed; `durable`, all is on
disk, fsync included; `restore`, from cold files into live tensors, for ours with every checksum and fingerprint (of the peers in the first
round only; of DCP once, which loads alike what any of its modes has saved). For ours and some that save in the background, beside steps
of matrix products: `train stall`, in the call; `lost`, the training time that one save costs; `slower`, a step beside a save over one
without, and `slower staging`, the step beside which the state leaves the device (ours: in memory alone as well, a snapshot a step). On a
device `rewind` brings the state back out of memory, `rewind anew` in a process that has to register that memory first. Ctrl-C ends it
with what has been measured.

Ours is a rank's `Tape` and the real drain process (`ours.py`); `write` is what that process says of itself. Each has saved once before, so
that nobody's buffers and processes are counted. Each restored state is compared to the bit with what was saved.

A figure is decided where medians and lowest of all rounds say the same: on a virtual disk, whose speed comes in bursts, one alone tells
little.

Measured with 1474 MiB on two cores of an AMD EPYC, torch 2.13.0, three rounds, nothing else running. Medians, in brackets the lowest, in
seconds. Ours: stall 0.36 (0.22; in a loop 0.21), write 0.85 (0.82), durable 1.29 (1.05), restore 1.06 (0.70), lost 0.61 (0.36), of which
the stall is a third. Direct I/O: write 0.90 (0.77), read 0.62 (0.56). Durable: DCP's best async 1.95 (1.88), torchsnapshot 2.75 (2.10),
orbax 3.43 (3.33) at its best. Met: the write (0.95 x the direct one; lowest over lowest 1.06). Missed: 2.5 x faster than DCP (1.5 x;
DCP is 2.2 x the disk's limit there), 5 x than orbax (2.7 x), 1.15 x the direct read (1.7 x; lowest 1.25 x), 0.1 s lost a GiB (0.42; lowest
0.25). Once the disk's burst is spent, restoring and the bare read take alike: 1.28 (0.99) and 1.36 (1.28) in six turns each.

Since then reads go into huge pages, ours and the bare one's: scattered pages split a request so that it fills such a disk's queue alone.
Restore and bare read alone, nine turns each: 0.95 (0.82) and 0.87 (0.64), pair by pair 1.18 x, lowest over lowest 1.29 x: not decided.

Measured with 7690 MiB on one H200 (16 cores, a virtual disk, torch 2.11.0), one round: each peer once, ours twice, in a step 18 times, the
link's limits twice. Ours: train stall 3.7 ms (3.3), staged 0.157 (0.154; link 0.150), durable 3.73 (3.67), write 3.53 (3.49), restore 5.30
(5.07), rewind 0.158 (link 0.150), anew 0.60, slower 1.006 beside the write and 1.003 beside staging, lost 0.03 a save. Direct I/O: write
5.06 (4.41), which is no limit there: ours was faster each time, and one of its two writes had a file to truncate first (no longer so);
read 5.26 (5.13), and torch.load was faster. Durable: DCP's stagers 7.14 and 7.63, its 2 threads 7.92, 1 thread 11.3, its default modes
11.0 and 14.7 (stalls of 4.0 and 5.4); torch.save 7.28. On tmpfs: ours 2.77 (2.75), one stream 2.85 (2.57), DCP 4.96 to 11.4. Missed: the
stall (3 ms; 1 % of a step of 254 ms), 2.5 x faster than DCP (1.9 x), 10 x on tmpfs (1.8 x: one file takes 2.7 GB/s there however many
threads write, 16 files 30 GB/s).
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from contest import Contest
from costs import timed
from judge import Judge, say_table
from measure import report, say
from peers import ROSTER
from states import MIB, nbytes, transformer_state

from mt_resilient.training import device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cuda, musa or cpu")
    parser.add_argument("--mib", type=int, help="size of the state; 1474 on the CPU, 8192 on a device unless given")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=7.0, help="no round is begun that would not end by then")
    parser.add_argument("--only", nargs="*", default=list(ROSTER), choices=list(ROSTER), help="peers to compare with")
    parser.add_argument("--directory", type=Path, help="on the disk to measure; a temporary one unless given")
    parser.add_argument("--tmpfs", type=Path, help="save there as well; /dev/shm on a device unless given")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    options = parser.parse_args()
    started, kind = time.monotonic(), options.device
    warnings.simplefilter("ignore")
    state = transformer_state((options.mib or (1474 if kind == "cpu" else 8192)) * MIB, kind)
    say(f"  {len(state)} tensors, {nbytes(state) / MIB:.0f} MiB on {kind}, torch {torch.__version__}")
    tmpfs = options.tmpfs or (None if kind == "cpu" else Path("/dev/shm"))
    with ExitStack() as places:
        place, memory = (
            Path(places.enter_context(TemporaryDirectory(prefix="snapshot-", dir=home))) if wanted else None
            for home, wanted in ((options.directory, True), (tmpfs, tmpfs is not None))
        )
        assert place is not None
        contest = Contest(state, kind, place, memory, options.only, options.seed)
        try:
            contest.warm_up()
            longest_s = 0.0
            for number in range(options.rounds):
                if number and time.monotonic() - started + longest_s > 60 * options.minutes:
                    say(f"  no time for round {number + 1} of {options.rounds}")
                    break
                longest_s = max(longest_s, timed(lambda number=number: contest.round(with_restore=number == 0)))
                say(f"  round {number + 1}: {longest_s:.0f} s, load {os.getloadavg()[0]:.1f}")
            contest.rank_anew()
            contest.in_memory()
        except KeyboardInterrupt:
            say("  interrupted: this is what was measured until then")
        say_table(contest.measured)
        named = {} if kind == "cpu" else {"device": device.module(kind).get_device_name()}
        report("snapshot", Judge(contest.measured, state, kind).results(), **named)
        contest.close()


if __name__ == "__main__":
    main()
