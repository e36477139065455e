"""What grows with the number of tensors, and with that of snapshots: times of what `tests/integration/test_many.py` counts.

    python benchmarks/many.py [--tensors N] [--snapshots N] [--repeats N]

Two ranks' states of N small tensors are staged, drained and opened again; N snapshots of one tensor are listed, as an agent does every
second. Nothing here depends on the size of a state: all times are overhead.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from measure import Result, median, report, say

from mt_resilient.checkpoint.arena import arena
from mt_resilient.checkpoint.arena.arena import RankArena
from mt_resilient.checkpoint.arena.slot_header import Header
from mt_resilient.checkpoint.arena.staging import Stager
from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.checkpoint.backend.paths import Attempt
from mt_resilient.checkpoint.durable import catalog
from mt_resilient.checkpoint.durable.load import open_rank
from mt_resilient.checkpoint.durable.save import drain
from mt_resilient.checkpoint.slabs.slab_writer import by_tensorstore

RANKS = 2
FEW = 100


class Saver:
    def __init__(self, root: Path) -> None:
        self.root = root
        self._ranks = [RankArena(row) for row in arena.paths(arena.create(RANKS, 2), os.getpid())]
        self._stagers = [Stager() for _ in self._ranks]
        self._step = 0

    def stage(self, tensors: int) -> float:
        """Stage a state of this many tensors: collect it, lay it out, copy it. Return the seconds for which this would delay a rank's
        loop."""
        self._step += 1
        state = {f"layers.{index:05}.weight": torch.zeros(8) for index in range(tensors)}
        started = time.perf_counter()
        for rank, (slots, stager) in enumerate(zip(self._ranks, self._stagers, strict=True)):
            layout, encoded, leaves = stager.plan(state, torch.is_tensor)
            described = Header(
                generation=1,
                step=self._step,
                rank=rank,
                world=RANKS,
                pieces=tensors,
                payload_bytes=layout.payload_bytes,
            )
            claimed = slots.claim(described, encoded)
            assert claimed is not None
            slot, view = claimed
            stager.stage(leaves, layout, view)
            slot.staged()
            slot.seal()
            self._described = described
        return (time.perf_counter() - started) / RANKS

    def save(self) -> Path:
        attempt = Attempt(run="00000000", stamp=self._described.stamp)
        written = drain([slots.slots for slots in self._ranks], attempt, Files(self.root), 0.0, by_tensorstore)
        assert written is not None
        assert isinstance(written.snapshot, Files)
        return written.snapshot.path


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def metadata_bytes(snapshot: Path) -> int:
    return sum(path.stat().st_size for path in snapshot.rglob("*") if path.is_file() and path.name != "0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--snapshots", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rows: list[Result] = []
    each: dict[int, float] = {}
    for tensors in (FEW, options.tensors):
        with TemporaryDirectory() as root:
            saver = Saver(Path(root))
            staged = [saver.stage(tensors) for _ in range(options.repeats + 1)][1:]
            saved, snapshot = timed(lambda saver=saver: saver.save()), saver.save()
            opened = [timed(lambda s=snapshot: open_rank(Files(s), 0, RANKS)) for _ in range(options.repeats)]
            each[tensors] = metadata_bytes(snapshot) / tensors / RANKS
            files = sum(path.is_file() for path in snapshot.rglob("*"))
        say(
            f"  {tensors} tensors: staged in {1000 * (median(staged) or 0):.1f} ms a rank, {each[tensors]:.0f} bytes of metadata a tensor"
        )
        rows += [
            Result(name=f"staging {tensors} small tensors, one rank", ours=median(staged), unit="s"),
            Result(name=f"writing them, {RANKS} ranks", ours=saved, unit="s"),
            Result(name=f"opening a rank of {tensors} tensors", ours=median(opened), unit="s"),
        ]
    most = 4 * RANKS + 3
    target = "<= 4 a rank + 3"
    rows.append(Result(name="files of a snapshot", ours=files, limit=most, unit="files", target=target))
    few, many = each.values()
    target = "no more with many tensors than with few"
    rows.append(Result(name="metadata a tensor", ours=many, peer=few, limit=1.05 * few, unit="bytes", target=target))
    with TemporaryDirectory() as root:
        saver = Saver(Path(root))
        for _ in range(options.snapshots):
            saver.stage(1)
            saver.save()
        place = Files(saver.root)
        looks = [timed(lambda place=place: catalog.look(place)) for _ in range(options.repeats)]
        there = catalog.look(place).durable
        asked = [timed(lambda place=place: catalog.stored(place, there, {})) for _ in range(options.repeats)]
    for name, took in (("listing", looks), ("asking for age and size of", asked)):
        named = f"{name} {options.snapshots} snapshots"
        rows.append(Result(name=named, ours=median(took), limit=0.2, unit="s", target="<= 0.2 s"))
        say(f"  {named}: {1000 * (median(took) or 0):.1f} ms")
    report("many", rows)


if __name__ == "__main__":
    main()
