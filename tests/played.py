"""An agent's arena and its ranks, played by a test, and a real drain process beside them."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from mt_resilient.checkpoint.arena import arena
from mt_resilient.checkpoint.arena.arena import RankArena, Slot
from mt_resilient.checkpoint.arena.slot_header import Header, Stamp
from mt_resilient.checkpoint.arena.staging import Stager
from mt_resilient.checkpoint.backend import paths
from mt_resilient.checkpoint.backend.paths import Attempt
from mt_resilient.checkpoint.backend.place import Place
from mt_resilient.checkpoint.durable.save import drain
from mt_resilient.checkpoint.slabs.slab_writer import writer

RUN = "5eed5eed"
PATIENCE_S = 60.0


class Node:
    """An agent's arena and its ranks, played by the test; each rank's state is noise that (rank, step, seed)
    decides, behind `shared_bytes` that are the same on all of them."""

    def __init__(
        self,
        root: Place,
        ranks: range = range(2),
        *,
        world: int = 2,
        nbytes: int = 100_000,
        slots: int = 2,
        shared_bytes: int = 0,
    ) -> None:
        self.root, self.ranks, self.world, self.nbytes = root, ranks, world, nbytes
        (root / paths.SNAPSHOTS).write(paths.JOB, b"")  # as the agent does before it starts a drain process
        self.shared_bytes = shared_bytes
        self.fds = arena.create(len(ranks), slots)
        self.paths = arena.paths(self.fds, os.getpid())
        self.arenas = [RankArena(row) for row in self.paths]
        self._drains: list[DrainProcess] = []

    def snapshot(
        self, step: int, *, seed: int = 0, generation: int = 1, durable: bool = True, values: Mapping[str, object] = {}
    ) -> bool:
        claims = []
        for rank, slots in zip(self.ranks, self.arenas, strict=True):
            state: dict[str, object] = {"step": step, "seed": seed, **values}
            if self.shared_bytes:
                state["shared"] = noise(self.shared_bytes, step, seed)
            state["x"] = noise(self.nbytes, rank, step, seed)
            stager = Stager()
            layout, encoded, leaves = stager.plan(state, lambda value: False)
            wanted = Header(
                marked=True,
                generation=generation,
                step=step,
                durable=durable,
                rank=rank,
                world=self.world,
                pieces=len(layout.pieces),
                payload_bytes=layout.payload_bytes,
            )
            claims.append(slots.claim(wanted, encoded))
            if claims[-1] is not None:
                slot, view = claims[-1]
                stager.stage(leaves, layout, view)
                slot.staged()
        whole = all(claims)
        for claimed in claims:
            if claimed is not None:
                claimed[0].seal() if whole else claimed[0].free()
        return whole

    def drain(self, before: Sequence[str] = (), **more: object) -> DrainProcess:
        config = {
            "arena": self.paths,
            "root": self.root.address,
            "run": RUN,
            "local_ranks": len(self.ranks),
            "keep": 2,
            "poll_s": 0.01,
        }
        self._drains.append(DrainProcess(config | more, before))
        return self._drains[-1]

    def drain_here(self, step: int, *, generation: int = 1) -> Place:
        """The snapshot of `step`, written by this very process."""
        slots = [[Slot(path) for path in row] for row in self.paths]
        report = drain(slots, Attempt(run=RUN, stamp=Stamp(generation, 0, step)), self.root, 0, writer(self.root))
        for slot in chain(*slots):
            slot.close()
        assert report is not None
        return report.snapshot

    def close(self) -> None:
        """With its drain processes, whatever has become of the test."""
        for process in self._drains:
            process.kill()
        for slots in self.arenas:
            slots.close()
        for fd in chain(*self.fds):
            os.close(fd)


def noise(nbytes: int, *seeds: int) -> NDArray[np.uint8]:
    return np.frombuffer(np.random.default_rng(seeds).bytes(nbytes), np.uint8)


class DrainProcess:
    def __init__(self, config: dict[str, object], before: Sequence[str] = ()) -> None:
        """before: what the command line begins with."""
        command = [*before, sys.executable, "-m", "mt_resilient.agent.snapshots.drain_process", json.dumps(config)]
        # Without a buffer, in which `select` would not see a second line.
        self.process = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/")

    def events(self, until: str) -> list[dict]:
        """The events up to the first of kind `until`."""
        assert self.process.stdout is not None
        found: list[dict] = []
        while not found or found[-1]["event"] != until:
            assert select.select([self.process.stdout], [], [], PATIENCE_S)[0], f"no {until!r} after {found}"
            line = self.process.stdout.readline()
            assert line, f"it ended after {found}"
            found.append(json.loads(line))
        return found

    def say(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{' '.join(map(str, words))}\n".encode())

    def finish(self) -> list[dict]:
        self.say("finish")
        found = self.events("finished")
        assert self.process.wait(PATIENCE_S) == 0
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
