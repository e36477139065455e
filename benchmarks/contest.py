"""Run our snapshots, their peers and the limits in turn on the same state, and record the time that each takes (`snapshot.py`)."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from costs import Work, kept, restored, saved, timed, trained
from judge import BUFFERED, DIRECT, LINK, MEMORY, MEMORY_FILES, OURS, Table
from limits import Limits
from measure import say
from ours import Ours
from peer import AsyncPeer, Peer
from peers import gather
from states import State, same

from mt_resilient.training import device

TRAINED = ("DCP async, thread, stager", "DCP async, process, stager", "torchsnapshot", "orbax zarr3, uncompressed")
"""The peers that are also measured during training steps, as our snapshots are."""
PAIRS = 2
"""The number of measurements of our snapshots and of the limits in one round."""
STEP_S = {"cpu": 0.15}
DEVICE_STEP_S = 0.25


class Contest:
    def __init__(
        self, state: State, kind: str, place: Path, memory: Path | None, only: Sequence[str], seed: int
    ) -> None:
        """memory: a directory on a tmpfs, for additional saves there."""
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
        """Measure a restarted rank's rewind: the arena contains the state, but the rank has to register its memory first."""
        for tensor in self._into.values():
            tensor.fill_(7)
        device.synchronize(self._into.values())
        back = self._ours.rank_anew(self._into)
        self._note(OURS, "rewind anew", timed(back))
        self._compare(OURS)

    def in_memory(self) -> None:
        """Measure saves to the tmpfs. This must come last, because our snapshots stay on the tmpfs."""
        if self._memory is None:
            return
        memory, raw = self._memory, self._memory / "raw"
        self._ours.drain_to(memory / "ours", self._state)
        for number in range(PAIRS):
            self._note(MEMORY, "tmpfs", timed(lambda: self._limits.write(raw, 0)))
            raw.unlink()
            self._note(MEMORY_FILES, "tmpfs", timed(lambda: self._limits.write_files(raw, os.cpu_count() or 1)))
            shutil.rmtree(raw)
            self._note(OURS, "tmpfs", saved(self._ours, self._state, memory / "ours")["durable"])
            self._note(OURS, "tmpfs write", float(self._ours.last["seconds"]))
            self._ours.settle_down()
            for peer in [peer for peer in self.peers if peer.name.startswith("DCP") and not number]:
                self._attempt(peer, lambda peer=peer: self._peer_in_memory(peer, memory / "peer"))

    def close(self) -> None:
        self._ours.close()
        for peer in self.peers:
            peer.close()

    # -- one round ---------------------------------------------------------------------------------------------------------

    def _peer(self, peer: Peer, with_restore: bool) -> None:
        directory = self._place / "peer"
        self._note_all(peer.name, saved(peer, self._state, directory))
        known = peer.name.startswith("DCP") and self._dcp_restored  # all modes of DCP load in the same way
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
            file.unlink(missing_ok=True)  # so that this writes a new file, as our snapshots do
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
        """Run both, in a random order. The raw file exists after the first pair."""
        for each in self._chance.sample([one, other], 2):
            each()

    def _attempt(self, peer: Peer, work: Callable[[], float | None]) -> float | None:
        """Run `work` of a peer. If the peer fails, report that and leave it out from then on. The benchmark continues."""
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
