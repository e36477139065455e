"""Judges whether this node's snapshots in memory and on disk agree, are fit to resume from, and are certified. Marks those on disk
accordingly.

Replicas (which agreed) + Shelf (which are on disk) ──▶ agreed and certified steps for the status; CERTIFIED and REJECTED in storage
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from ...checkpoint.arena.arena import Slot
from ...checkpoint.arena.slot_header import Stamp, complete
from ...checkpoint.backend.paths import ORDERED, SNAPSHOTS, Attempt
from ...checkpoint.backend.place import Place
from ...checkpoint.durable import commit, load
from ...resilience.clock import monotonic_s, wall_s
from ...resilience.model.node import NodeStatus
from ...resilience.model.rewind import Remedy
from ...resilience.model.signals import Sighting
from ...resilience.model.types import Step
from ...resilience.plan.resume_point import StabilityPolicy
from ...resilience.text import formatting
from .durable_index import Shelf
from .fingerprint_source import Sight, stored
from .replica_check import TOLD, Replicas
from .storage_worker import Errands

_NEVER = sys.maxsize
_NO_DOUBT = Remedy.WAIT, Remedy.LEAVE_ALONE
_LEFT = (
    "at step {} every optimizer moment differs between the ranks, as it did before they went back. The script seems to train each rank "
    "independently, its kernels are not deterministic, or the hardware is faulty. The agent no longer compares replicas"
)
_AGAIN = (
    "at step {} {} differ between the ranks again, with the same bits on each rank as before the ranks went back. So the script trains "
    "them on each rank by itself, or faulty hardware repeats its error. The agent no longer compares them, and certifies no further "
    "snapshot"
)
_EARLY = (
    "{} not compared, because {} differed between the ranks at step {}, before they had been the same in four snapshots. The script seems "
    "to train them independently on each rank, or the hardware is faulty"
)
_APART = "data-parallel replicas had diverged when it was taken"


class Soundness:
    def __init__(
        self,
        slots: Sequence[Sequence[Slot]],
        shelf: Shelf,
        root: Place,
        run: str,
        policy: StabilityPolicy,
        window_h: float = 24.0,
    ) -> None:
        self._slots, self._shelf, self._root, self._run = slots, shelf, root, run
        self._errands = Errands()
        self._replicas = Replicas(slots, policy, window_h)
        self._finished = -1
        self._doubted = self._watched = _NEVER
        self._told = set[object]()
        self.sentences: list[tuple[str, str]] = []
        """Sentences for the log, each with its mood (severity). The caller that reports a sentence removes it."""

    def doubt(self, found: Sequence[Sighting]) -> None:
        """Certify no snapshot from the onset of a finding in `found` on, nor one within `certify_after_steps` before it. A watch that has
        ended leaves no doubt. `went_back` clears the rest, because the ranks then continue from an earlier step."""
        waits = [each.onset for each in found if each.remedy == Remedy.WAIT and not each.outcome]
        self._watched = min(waits, default=_NEVER)
        self._doubted = min(self._doubted, *(each.onset for each in found if each.remedy not in _NO_DOUBT), _NEVER)

    def look(self, generation: int, finished: int, *, every: bool = False) -> bool:
        """Compare new snapshots, and mark snapshots in storage as certified or rejected. Return True if a new divergence of replicas was
        found. generation: the generation that the node is in. finished: the last step that all its ranks have finished. every: compare all
        snapshots in memory, because one of them will be chosen for a restore."""
        self._finished = min(finished, self._doubted - 1, self._watched - 1)
        news = self._replicas.look(monotonic_s(), wall_s(), generation, every=every)
        read = [result for _, result in self._errands.results() if isinstance(result, Sight)]
        news = self._replicas.judge(read, wall_s(), generation) or news
        if words := self._replicas.copies():
            self.say_once("copies", words, "info")
        if self._replicas.left >= 0:
            self.say_once("left", _LEFT.format(self._replicas.left), "warn")
        if again := self._replicas.again:
            self.say_once(("again", again), _AGAIN.format(again.step, formatting.listed(again.names)), "warn")
        if early := self._replicas.early:
            names = formatting.listed(early.names)
            which = (
                "the data-parallel replicas are" if early.blind else "some tensors of the data-parallel replicas are"
            )
            self.say_once(("early", early), _EARLY.format(which, names, early.step), "warn")
        self._mark()
        return news

    def say_once(self, what: object, sentence: str, mood: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self.sentences.append((sentence, mood))

    def _mark(self) -> None:
        certified = self._replicas.certified([stamp for _, stamp in self._durable()], self._finished)
        left = self._shelf.seen.left
        for name, stamp in (*self._durable(), *self._ours(left)):
            place = self._root / SNAPSHOTS / name
            if not self._replicas.fit(stamp):
                self.say_once(name, f"the snapshot {name} is set aside: {_APART}", "bad")
                self._errands.ask(f"reject {name}", lambda place=place: commit.reject(place, _APART, wall_s()))  # type: ignore[misc]
            elif name in left:
                continue
            elif not self._replicas.compared(stamp):
                self._errands.ask(f"read {name}", lambda place=place, stamp=stamp: self._read(place, stamp))  # type: ignore[misc]
            elif stamp in certified and name not in self._shelf.seen.certified:
                self._errands.ask(f"certify {name}", lambda place=place: commit.certify(place))  # type: ignore[misc]

    def ordered(self, request: str, step: int) -> None:
        """Mark the snapshot that a person ordered, once it is on disk. request: the order's id; step: the first step that satisfies it."""
        there = [(stamp.step, name) for name, stamp in self._durable() if stamp.step >= step]
        if there and step >= 0:
            place = self._root / SNAPSHOTS / min(there)[1]
            self._errands.ask(f"ordered {request}", lambda: commit.mark(place, ORDERED))

    def _read(self, place: Place, stamp: Stamp) -> Sight:
        """Return fingerprints from disk of a snapshot whose memory was overwritten before the agent compared it."""
        ranks = [max(slot.header().rank for slot in row) for row in self._slots]
        with commit.reading(place):
            return stored(stamp, [load.open_rank(place, rank) for rank in ranks])

    def _durable(self) -> Iterator[tuple[str, Stamp]]:
        """Return names and stamps (generation, rewinds, step) of the snapshots on disk that this run of the job has written."""
        return self._ours(name for _, name in self._shelf.seen.durable)

    def _ours(self, names: Iterable[str]) -> Iterator[tuple[str, Stamp]]:
        for name in names:
            attempt = Attempt.parse(name)
            if attempt and attempt.run == self._run:
                yield name, attempt.stamp

    def fit(self, name: str) -> bool:
        """Return whether training may resume from the snapshot on disk, as far as is known."""
        attempt = Attempt.parse(name)
        return attempt is None or attempt.run != self._run or self._replicas.fit(attempt.stamp)

    def memory(self) -> list[Stamp]:
        """Return the snapshots in memory from which the ranks can resume."""
        headers = [[slot.header() for slot in row] for row in self._slots]
        return sorted(stamp for stamp in complete(headers, len(self._slots)) if self._replicas.fit(stamp))

    def free_unfit(self) -> None:
        """Free the snapshots in memory that are not fit to resume from. Call `free_unfit` only while no rank is alive."""
        for slot in chain(*self._slots):
            header = slot.header()
            if header.whole and not self._replicas.fit(header.stamp):
                slot.free()

    def went_back(self, step: int, generation: int = 0, rewinds: int = 0) -> None:
        self._doubted = _NEVER
        self._replicas.went_back(step, generation, rewinds)

    def told(self, said: NodeStatus) -> dict[str, object]:
        """Return the fields that this module adds to the status `said`."""
        held = {*self.memory(), *(stamp for _, stamp in self._durable())}
        here = {*said.memory_steps, *said.durable_steps}
        marked = {step for step, name in self._shelf.seen.durable if name in self._shelf.seen.certified}
        ledger = self._replicas.ledger if self._replicas.left < 0 else None
        certified = {stamp.step for stamp in self._replicas.certified(held, self._finished)}
        return {
            "agreed_steps": _steps({stamp.step for stamp in held if self._replicas.agreed(stamp)} & here),
            "certified_steps": _steps((certified | marked) & here),
            "compared": ledger.compared if ledger else 0,
            "mismatches": self._replicas.mismatches[-TOLD:],
            "held": self._replicas.held,
            "frozen": self._replicas.frozen,
        }


def _steps(found: set[int]) -> tuple[Step, ...]:
    return tuple(map(Step, sorted(found)))
