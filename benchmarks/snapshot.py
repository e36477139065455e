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
import random
import shutil
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from costs import Work, kept, restored, saved, timed, trained
from limits import Limits
from measure import Result, report, say
from ours import Ours
from peers import ROSTER, AsyncPeer, Peer, gather
from states import MIB, State, nbytes, same, transformer_state

from mt_resilient.training import device

OURS = "mt-resilient"
DIRECT, BUFFERED, MEMORY = "limit: direct I/O", "limit: page cache", "limit: tmpfs"
LINK = "limit: link"
TRAINED = ("DCP async, thread, stager", "DCP async, process, stager", "torchsnapshot", "orbax zarr3, uncompressed")
"""Beside ours."""
PAIRS = 2
"""How often ours and the limits are taken in one round."""
STEP_S = {"cpu": 0.15}
DEVICE_STEP_S = 0.25

Table = dict[str, dict[str, list[float]]]
"""Seconds of each round, by who and by measure."""


class Contest:
    def __init__(
        self, state: State, kind: str, place: Path, memory: Path | None, only: Sequence[str], seed: int
    ) -> None:
        """memory: a directory on a tmpfs, to save to as well."""
        self._state, self._kind, self._place, self._memory = state, kind, place, memory
        self._into = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        self._chance = random.Random(seed)
        self._work = Work(kind, STEP_S.get(kind, DEVICE_STEP_S))
        self._limits = Limits(state, kind)
        self._ours = Ours(place / "ours")
        self._dcp_restored = False
        field = gather(only)
        for name, reason in field.missing.items():
            say(f"  {name}: left out, {reason}")
        self.peers: list[Peer] = [*field.peers]
        self.measured: Table = defaultdict(lambda: defaultdict(list))
        self.versions = {peer.name: peer.version for peer in (self._ours, *self.peers)}

    def warm_up(self) -> None:
        self._ours.warm_up(self._state)
        for peer in [peer for peer in self.peers if isinstance(peer, AsyncPeer)]:
            first = self._attempt(peer, lambda peer=peer: saved(peer, self._state, self._place / "first")["durable"])
            if first is not None:
                say(f"  {peer.name}: the first save was durable after {first:.2f} s")
            shutil.rmtree(self._place / "first", ignore_errors=True)

    def round(self, with_restore: bool) -> None:
        order: list[Peer] = [self._ours, *self.peers]
        self._chance.shuffle(order)
        for peer in order:
            started = time.perf_counter()
            if peer is self._ours:
                self._ours_and_limits()
            else:
                self._attempt(peer, lambda peer=peer: self._peer(peer, with_restore))
            say(f"  {peer.name}: {time.perf_counter() - started:.1f} s")

    def rank_anew(self) -> None:
        """What a restarted rank finds: the arena holds the state, and its memory has to be registered first."""
        for tensor in self._into.values():
            tensor.fill_(7)
        device.synchronize(self._into.values())
        back = self._ours.rank_anew(self._into)
        self._note(OURS, "rewind anew", timed(back))
        self._compare(OURS)

    def in_memory(self) -> None:
        """The last: ours does not come back."""
        if self._memory is None:
            return
        memory, raw = self._memory, self._memory / "raw"
        self._ours.drain_to(memory / "ours", self._state)
        for number in range(PAIRS):
            self._note(MEMORY, "tmpfs", timed(lambda: self._limits.write(raw, 0)))
            raw.unlink()
            self._note(OURS, "tmpfs", saved(self._ours, self._state, memory / "ours")["durable"])
            self._note(OURS, "tmpfs write", float(self._ours.last["seconds"]))
            self._ours.settle_down()
            for peer in [peer for peer in self.peers if peer.name.startswith("DCP") and not number]:
                self._attempt(peer, lambda peer=peer: self._peer_in_memory(peer, memory / "peer"))

    def close(self) -> None:
        self._ours.close()
        for peer in self.peers:
            peer.close()

    # -- one of a round ----------------------------------------------------------------------------------------------------

    def _peer(self, peer: Peer, with_restore: bool) -> None:
        directory = self._place / "peer"
        self._note_all(peer.name, saved(peer, self._state, directory))
        known = peer.name.startswith("DCP") and self._dcp_restored  # it loads alike what any of its modes has saved
        if with_restore and not known:
            self._note(peer.name, "restore", restored(peer, self._into, directory))
            self._compare(peer.name)
            self._dcp_restored |= peer.name.startswith("DCP")
        shutil.rmtree(directory)
        if isinstance(peer, AsyncPeer) and peer.name in TRAINED:
            self._note_all(peer.name, trained(peer, self._state, directory, self._work))
            shutil.rmtree(directory)

    def _ours_and_limits(self) -> None:
        ours, limits = self._ours, self._limits
        raw, cached = self._place / "raw", self._place / "cached"

        def save() -> None:
            self._note_all(OURS, saved(ours, self._state, ours.root))
            self._note(OURS, "write", float(ours.last["seconds"]))
            ours.settle_down()

        def restore() -> None:
            self._note(OURS, "restore", restored(ours, self._into, ours.root))
            self._compare(OURS)

        def write(name: str, file: Path, flags: int) -> None:
            file.unlink(missing_ok=True)  # ours writes new files, too
            os.sync()
            self._note(name, "durable", timed(lambda: limits.write(file, flags)))

        for _ in range(PAIRS):
            self._beside(lambda: write(DIRECT, raw, os.O_DIRECT), save)
        write(BUFFERED, cached, 0)
        cached.unlink()
        for _ in range(PAIRS):
            self._beside(lambda: self._note(DIRECT, "restore", timed(lambda: limits.read(raw, os.O_DIRECT))), restore)
        raw.unlink()
        for _ in range(PAIRS):
            self._note(LINK, "staged", timed(lambda: limits.down(self._state)))
            self._beside(lambda: self._note(LINK, "rewind", timed(lambda: limits.up(self._into))), self._rewind)
        for _ in range(PAIRS):
            self._note_all(OURS, trained(ours, self._state, ours.root, self._work))
            ours.settle_down()
            for each in kept(lambda: ours.keep(self._state), self._work) if self._kind != "cpu" else ():
                self._note_all(OURS, each)

    def _rewind(self) -> None:
        for tensor in self._state.values():
            tensor.fill_(7)
        device.synchronize(self._state.values())
        self._note(OURS, "rewind", timed(lambda: self._ours.rewind(self._state)))
        self._compare(OURS)

    def _peer_in_memory(self, peer: Peer, directory: Path) -> None:
        try:
            self._note(peer.name, "tmpfs", saved(peer, self._state, directory)["durable"])
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _beside(self, one: Callable[[], None], other: Callable[[], None]) -> None:
        """Both, in an order that is drawn; raw files are there after the first."""
        for each in self._chance.sample([one, other], 2):
            each()

    def _attempt(self, peer: Peer, work: Callable[[], float | None]) -> float | None:
        """A peer that fails is out from then on, by name; it may not end the benchmark."""
        try:
            return work()
        except Exception as error:
            say(
                f"  {peer.name}: left out from here on, {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
            )
            self.peers.remove(peer)
            shutil.rmtree(self._place / "peer", ignore_errors=True)
            return None

    def _compare(self, name: str) -> None:
        if not same(self._into, self._state):
            raise RuntimeError(f"{name}: something else came back than was saved")

    def _note_all(self, name: str, costs: dict[str, float]) -> None:
        for measure, seconds in costs.items():
            self._note(name, measure, seconds)

    def _note(self, name: str, measure: str, seconds: float) -> None:
        self.measured[name][measure].append(seconds)


class Judge:
    """Measured seconds → results, with the targets that were set before measuring."""

    def __init__(self, measured: Table, state: State, kind: str) -> None:
        self._measured, self._gib, self._on_device = measured, nbytes(state) / 1024**3, kind != "cpu"

    def results(self) -> list[Result]:
        rows = self._on_a_device() if self._on_device else self._on_the_cpu()
        return [*rows, *self._rest()]

    def _on_the_cpu(self) -> list[Result]:
        return [
            self._against("write", DIRECT, "durable", 1.1, "<= 1.1 x raw direct write beside it"),
            self._against("durable", self._best("DCP async"), "durable", 1 / 2.5, "2.5 x faster than DCP's best async"),
            self._against("durable", self._best("orbax"), "durable", 1 / 5, "5 x faster than orbax's best"),
            self._against("restore", DIRECT, "restore", 1.15, "<= 1.15 x raw direct read beside it"),
            self._plain("lost", 0.1 * self._gib, "<= 0.1 s a GiB"),
        ]

    def _on_a_device(self) -> list[Result]:
        step_s = statistics.median(self._measured[OURS].get("step", [0.0]))
        return [
            self._plain("train stall", 0.003, "<= 3 ms"),
            self._plain("train stall", 0.01 * step_s, f"<= 1 % of the step, {1000 * step_s:.0f} ms"),
            self._against("staged", LINK, "staged", 1.1, "<= 1.1 x the link"),
            self._against("write", DIRECT, "durable", 1 / 0.9, ">= 0.9 x the disk"),
            self._against("durable", self._best("DCP"), "durable", 1 / 2.5, "2.5 x faster than DCP's best mode"),
            self._against("tmpfs", self._best("DCP", "tmpfs"), "tmpfs", 0.1, "10 x faster than DCP's best"),
            self._against("rewind", LINK, "rewind", 1 / 0.9, ">= 0.9 x the link"),
            self._plain("slower", 1.01, "<= 1 % slower beside a save", "ratio"),
        ]

    def _against(self, what: str, other: str, its: str, factor: float, target: str) -> Result:
        mine, theirs = self._measured[OURS].get(what, []), self._measured.get(other, {}).get(its, [])
        if not mine or not theirs:
            return Result(name=what, ours=None, unit="s", target=target)
        low, high = sorted(pick(mine) / pick(theirs) for pick in (min, statistics.median))
        peer = statistics.median(theirs)
        return Result(
            name=f"{what} ({other}: {its}; lowest over lowest {min(mine) / min(theirs):.3f})",
            ours=statistics.median(mine),
            peer=peer,
            limit=factor * peer,
            unit="s",
            target=target,
            decided=not low <= factor < high,
        )

    def _plain(self, what: str, limit: float, target: str, unit: str = "s") -> Result:
        mine = self._measured[OURS].get(what, [])
        if not mine:
            return Result(name=what, ours=None, unit=unit, target=target)
        return Result(
            name=what,
            ours=statistics.median(mine),
            limit=limit,
            unit=unit,
            target=target,
            decided=not min(mine) <= limit < statistics.median(mine),
        )

    def _best(self, family: str, measure: str = "durable") -> str:
        """The fastest of a family, by the median."""
        found = {
            name: statistics.median(figures[measure])
            for name, figures in self._measured.items()
            if name.startswith(family) and measure in figures
        }
        return min(found, key=lambda name: found[name], default=f"no {family} here")

    def _rest(self) -> list[Result]:
        """Everybody's medians and lowest."""
        return [
            Result(
                name=f"{measure}, {name}{how}", ours=pick(values), unit="ratio" if measure.startswith("slower") else "s"
            )
            for name, figures in self._measured.items()
            for measure, values in figures.items()
            for how, pick in (("", statistics.median), (", lowest", min))
        ]


def say_table(measured: Table) -> None:
    """Medians, in seconds."""
    columns = list(dict.fromkeys(measure for figures in measured.values() for measure in figures))
    say(f"\n  {'median, lowest (s)':27}" + "".join(f"{column:>14}" for column in columns))
    for name in sorted(measured, key=lambda name: statistics.median(measured[name].get("durable", [0.0]))):
        cells = (measured[name].get(column) for column in columns)
        told = ("" if cell is None else f"{statistics.median(cell):.3f} {min(cell):.3f}" for cell in cells)
        say(f"  {name:27}" + "".join(f"{each:>14}" for each in told))


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
