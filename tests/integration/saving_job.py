"""A small job that saves without a pause: an agent that owns an arena, two ranks forked from it, and the real drain process.

`save_kills.py` forks the agent, tells it "go" and "hold", and kills what it likes. The agent has the ranks stage step after step, each
wanted on disk, and seals what both have staged; told of halves, it has one rank alone seal, and waits for the other to be killed. When
a rank dies it does as the real one: ends the worker group, settles what it left, and starts the next one from the newest step that all can
read, whose bytes the ranks compare with those that (rank, step, seed) decide. What ends in any way but by a kill is told as wrong.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mt_resilient.checkpoint.arena import arena
from mt_resilient.checkpoint.arena.arena import RankArena, Slot, State, settle
from mt_resilient.checkpoint.arena.fill import destinations, fill
from mt_resilient.checkpoint.arena.slot_header import Header, complete
from mt_resilient.checkpoint.arena.staging import Stager
from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.checkpoint.backend.place import Place
from mt_resilient.checkpoint.durable import catalog
from mt_resilient.checkpoint.durable.load import chunks, open_rank
from mt_resilient.checkpoint.format.pytree import unflatten
from mt_resilient.checkpoint.format.tensor_table import Table
from mt_resilient.resilience.ipc import die_with_parent

RANKS, SLOTS, KEEP = 2, 3, 3
SHIFT_BYTES, SHIFTS = 64, 1 << 14
"""From a step's noise to the next one's: making it anew would take longer than staging it."""


@cache
def noise(rank: int, seed: int, nbytes: int) -> bytearray:
    return bytearray(np.random.default_rng([rank, seed]).bytes(nbytes + SHIFT_BYTES * SHIFTS))


def state_of(rank: int, step: int, seed: int, nbytes: int) -> dict[str, Any]:
    """A third of it is the same on all ranks."""
    start = SHIFT_BYTES * (step % SHIFTS)
    shared, own = (
        torch.frombuffer(noise(each, seed, nbytes), dtype=torch.uint8, count=nbytes, offset=start)
        for each in (RANKS, rank)
    )
    parts = [shared[: nbytes // 3], *own[nbytes // 3 :].split([nbytes // 7, 1, nbytes - nbytes // 3 - nbytes // 7 - 1])]
    return {"step": step, "tensors": {str(index): part for index, part in enumerate(parts)}}


class Fork:
    """A child of this process that runs `work(lines in, lines out)`, and is killed with it."""

    def __init__(self, work: Any) -> None:
        (theirs_in, self._ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                die_with_parent.die_with_parent(parent)
                os.close(self._ours_out)
                os.close(ours_in)
                work(theirs_in, theirs_out)
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            os._exit(code)
        os.close(theirs_in)
        os.close(theirs_out)
        self.fd, self._rest = ours_in, b""

    def tell(self, **what: Any) -> None:
        try:
            os.write(self._ours_out, json.dumps(what).encode() + b"\n")
        except BrokenPipeError:
            pass  # found dead soon

    def hear(self) -> list[dict[str, Any]] | None:
        """What it has said; None when it is gone."""
        data = os.read(self.fd, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines] if data else None

    def kill(self) -> int:
        """Its exit code: -9, unless it had ended by itself."""
        os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        os.close(self.fd)
        os.close(self._ours_out)
        return os.waitstatus_to_exitcode(status)


def lines(fd: int) -> Iterable[dict[str, Any]]:
    with os.fdopen(fd) as file:
        yield from map(json.loads, file)


def say(fd: int, **what: Any) -> None:
    os.write(fd, json.dumps(what).encode() + b"\n")


class Rank:
    def __init__(self, rank: int, paths: list[list[str]], root: Path, seed: int, nbytes: int) -> None:
        self._rank, self._root, self._seed, self._nbytes = rank, root, seed, nbytes
        self._slots = RankArena(paths[rank], turn=paths[0][0])
        self._stager = Stager()

    def run(self, heard: int, said: int) -> None:
        for order in lines(heard):
            step = order["step"]
            match order["order"]:
                case "stage":
                    say(said, event="staged" if self._stage(step, order["generation"]) else "missed", step=step)
                case "seal":
                    say(said, event="sealed" if self._slots.seal(step) else "missed", step=step)
                case "free":
                    slot = self._slots.holding(step)
                    if slot is not None:
                        slot.free()
                    say(said, event="freed", step=step)
                case "restore":
                    say(said, event="restored", step=self._restore(step))

    def _stage(self, step: int, generation: int) -> bool:
        state = state_of(self._rank, step, self._seed, self._nbytes)
        layout, encoded, leaves = self._stager.plan(state, torch.is_tensor)
        described = Header(
            generation=generation, step=step, rank=self._rank, world=RANKS, durable=True, pieces=len(layout.pieces),
            payload_bytes=layout.payload_bytes,
        )  # fmt: skip
        claimed = self._slots.claim(described, encoded)
        if claimed is None:
            return False
        slot, view = claimed
        self._stager.stage(leaves, layout, view)
        slot.staged()
        return True

    def _restore(self, step: int) -> int:
        """From memory, else from disk, as `Tape.go_back` does; the step that was found, -1 where its bytes are not right."""
        slot = self._slots.holding(step)
        if slot is not None:
            with slot.reading() as view:
                assert view is not None
                table = Table.from_json(view.table)
                into = destinations(table, {})
                fill(table, into, view.chunks(), view.fingerprints)
            return right(unflatten(table.skeleton, into), self._rank, self._seed, self._nbytes)
        for attempt in catalog.look(Files(self._root)).durable:
            if attempt.stamp.step == step:
                return held(attempt.under(Files(self._root)), self._rank, self._seed, self._nbytes)
        return -1


def right(found: dict[str, Any], rank: int, seed: int, nbytes: int) -> int:
    """The step of the state `found`, -1 where it is not to the bit that of `rank`."""
    expected = state_of(rank, found["step"], seed, nbytes)["tensors"]
    same = found["tensors"].keys() == expected.keys()
    return found["step"] if same and all(torch.equal(found["tensors"][k], expected[k]) for k in expected) else -1


def held(snapshot: Place, rank: int, seed: int, nbytes: int) -> int:
    manifest = open_rank(snapshot, rank, RANKS)
    into = destinations(manifest.table, {})
    fill(manifest.table, into, chunks(snapshot, manifest), manifest.words())
    return right(unflatten(manifest.table.skeleton, into), rank, seed, nbytes)


class Agent:
    """Told whether to go, and whether by halves; tells what happens."""

    def __init__(self, root: Path, seed: int, nbytes: int, mb_per_s: float, life: int) -> None:
        self._root, self._seed, self._nbytes = root, seed, nbytes
        self._generation = catalog.next_generation(Files(root))
        self._step = max((attempt.stamp.step for attempt in catalog.look(Files(root)).durable[:1]), default=0)
        self._paths = arena.paths(arena.create(RANKS, SLOTS), os.getpid())
        self._slots = [[Slot(path) for path in row] for row in self._paths]
        self._config = {
            "arena": self._paths, "root": str(root), "run": f"{life:08x}", "local_ranks": RANKS, "keep": KEEP,
            "poll_s": 0.001, "max_write_mb_per_s": mb_per_s,
        }  # fmt: skip
        self._ranks: list[Fork] = []
        self._going = self._asked = False
        self._halves = 0
        """How many worker groups yet are to end amid a seal."""
        self._sealed = 0
        self._waiting: Counter[str] = Counter()

    def run(self, heard: int, said: int) -> None:
        self._said = said
        self._start_drain()
        self._start_ranks(torn=False)
        while True:
            if self._going and not self._waiting:
                self._step += 1
                self._order("stage")
            elif self._asked and not self._waiting:
                self._asked = False
                self._tell(event="held", step=self._sealed)
            files = [heard, self._drain.stdout, *(rank.fd for rank in self._ranks)]
            ready = select.select(files, [], [])[0]
            if heard in ready:
                if not (told := os.read(heard, 1 << 16)):
                    return
                last = json.loads(told.splitlines()[-1])
                self._going, self._halves = last["go"], last.get("halves", 0)
                self._asked = not self._going
                if self._going:
                    self._tell(event="going")
            if self._drain.stdout in ready:
                self._hear_drain()
            for rank in [rank for rank in self._ranks if rank.fd in ready]:
                if not self._hear_rank(rank):
                    self._rank_died()
                    break

    def _tell(self, **what: Any) -> None:
        say(self._said, **what, pids={"drain": self._drain.pid, "ranks": [rank.pid for rank in self._ranks]})

    def _order(self, order: str, ranks: int = RANKS) -> None:
        self._waiting = Counter(answers=ranks)
        for rank in self._ranks[:ranks]:
            rank.tell(order=order, step=self._step, generation=self._generation)

    def _hear_rank(self, rank: Fork) -> bool:
        answers = rank.hear()
        for answer in answers or ():
            self._waiting[answer["event"]] += 1
            self._waiting["answers"] -= 1
            if answer["event"] == "restored" and answer["step"] != self._step:
                self._tell(event="wrong", step=self._step, found=answer["step"])
        if answers and not self._waiting["answers"]:
            last, self._waiting = self._waiting, Counter()
            if last["missed"]:
                self._order("free")
            elif last["staged"]:
                self._order("seal", 1 if self._halves else RANKS)
            elif last["sealed"] and self._halves:
                self._waiting = Counter(death=1)
                self._tell(event="half sealed")
            elif last["sealed"]:
                self._sealed = self._step
            elif last["restored"]:
                self._sealed = self._step
                self._tell(event="back", step=self._step)
        return answers is not None

    def _rank_died(self) -> None:
        """As the real agent: the worker group ends, what it left is settled, the next one goes back to the newest that all can read."""
        codes = [rank.kill() for rank in self._ranks]
        if set(codes) != {-signal.SIGKILL}:
            self._tell(event="wrong", why=f"the ranks ended with codes {codes}")
        headers = [[slot.header() for slot in row] for row in self._slots]
        torn = any(header.state is State.STAGING for row in headers for header in row)
        memory = {stamp.step for stamp in complete(headers, RANKS)}
        self._step = max(
            [*memory, *(attempt.stamp.step for attempt in catalog.look(Files(self._root)).durable)], default=0
        )
        settle(self._slots, self._step)
        self._generation, self._halves = self._generation + 1, max(0, self._halves - 1)
        self._start_ranks(torn)

    def _start_ranks(self, torn: bool) -> None:
        self._ranks = [Fork(partial(self._be_rank, rank)) for rank in range(RANKS)]
        self._waiting = Counter()
        self._tell(event="born", torn=torn)
        if self._step:
            self._order("restore")

    def _be_rank(self, rank: int, heard: int, said: int) -> None:
        """In the child, which opens the slots by itself: a lock belongs to all who share an open file. It never rests, so it gives way
        to all that the test waits for."""
        os.nice(5)
        Rank(rank, self._paths, self._root, self._seed, self._nbytes).run(heard, said)

    def _start_drain(self) -> None:
        command = [sys.executable, "-m", "mt_resilient.agent.snapshots.drain_process", json.dumps(self._config)]
        self._drain = die_with_parent.spawn(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        os.set_blocking(self._drain.stdout.fileno(), False)

    def _hear_drain(self) -> None:
        data = self._drain.stdout.read()
        for line in (data or b"").splitlines():
            if line.startswith(b'{"event": "durable"'):
                self._tell(event="durable")
            elif line.startswith(b'{"event": "failed"'):
                self._tell(event="wrong", why=line.decode())
        if data == b"":
            if (code := self._drain.wait()) != -signal.SIGKILL:
                self._tell(event="wrong", why=f"the drain process ended with code {code}")
            self._start_drain()
            self._tell(event="drained anew")
