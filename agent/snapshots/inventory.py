"""The snapshots that this node holds in memory and on disk, and which of them its ranks may go back to.

    arena slots, Shelf (what is on disk), Soundness (what it is worth), Copies (of another node's) ──▶ Holdings ──▶ steps for the status

When the training goes back, all of them discard the steps that no longer belong to its lineage.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain

from ...checkpoint.arena.arena import Slot
from ...checkpoint.arena.group_cleanup import settle
from ...checkpoint.arena.slot_header import Stamp, State
from ...checkpoint.backend import paths
from ...checkpoint.backend.paths import Attempt
from ...checkpoint.backend.place import Place
from ...checkpoint.durable import commit
from ...resilience.errors import ResilientError
from ...resilience.model.generation import GenerationRecord
from ...resilience.model.node import InPlaceRewind
from ...resilience.plan.resume_point import StabilityPolicy
from ..buddy.buddy_client import Copies
from .durable_index import Shelf
from .storage_worker import Urgent
from .trust import Soundness

FRESH_S = 1.0
"""How long storage may take to list its snapshots when a fresh answer matters. A stale answer costs steps, never bits. Less than a lease's
life."""


class Holdings:
    def __init__(
        self, slots: Sequence[Sequence[Slot]], root: Place, run: str, stability: StabilityPolicy, copies: Copies | None
    ) -> None:
        """slots: of each rank; root: place that holds `snapshots/`; run: eight hex digits that name this life of the job."""
        self.slots, self.root, self.copies = slots, root, copies
        self.shelf = Shelf(root)
        self.sound = Soundness(slots, self.shelf, root, run, stability)
        self._urgent = Urgent()
        self.unfit: set[str] = set()
        """Names of snapshots that are damaged, or that left the lineage."""
        self.generation = 0
        """Generation of the newest record that this node has obeyed."""
        self.seat: tuple[int, ...] = ()
        """Node rank and number of nodes of the ranks whose snapshots memory holds."""
        self._fetched: dict[Stamp, int] = {}
        """Snapshots that came from other nodes, and for which generation. Those nodes trained while this one did not."""
        self._settled = 0
        self._ended = -1
        self._left: list[tuple[int, tuple[int, int]]] = []
        """Steps that the training went back to, each with the generation and rewind number of the lineage since then."""

    def settle(self, record: GenerationRecord, node_rank: int) -> None:
        """Keep only what the ranks of `record` can go back to. Done once per record, because fetched snapshots come afterwards. No rank may
        be alive."""
        if self._settled == record.number:
            return
        self._settled = self.generation = record.number
        seat = (node_rank, len(record.members))
        newcomers = record.number in record.joined.values()
        upto = record.resume_step if seat == self.seat else -1  # other ranks cannot use it
        settle(self.slots, upto, torn=newcomers)
        self.seat = seat
        self.sound.went_back(record.resume_step, record.number)
        if record.onset >= 0:
            self._set_aside(record.onset - 1, (record.number, 0))
        if self.copies:
            self.copies.forget(lambda stamp: stamp.step > record.resume_step and stamp.generation < record.number)
            self.copies.begin()

    def end(self, record: GenerationRecord) -> None:
        """Discard what the job has computed since `record.onset`: the job ends, that state is wrong, and no later start may use it. No rank
        may be alive."""
        if record.onset < 0 or record.onset == self._ended:
            return
        self._ended = record.onset
        for slot in chain(*self.slots):
            if slot.header().whole and slot.header().step >= record.onset:
                slot.free()
        self._set_aside(record.onset - 1, (record.number + 1, 0))

    def clear(self, generation: int, finished: int, since: int) -> None:
        """Check what the next ranks may go on from. Free snapshots of generations before `since`: they are older than this node's last
        absence, in which the lineage may have changed. finished: last step that all the previous ranks have done. No rank may be alive."""
        for slot in chain(*self.slots):
            header = slot.header()
            if header.whole and max(header.generation, self._fetched.get(header.stamp, 0)) < since:
                slot.free()
        if self.copies:
            self.copies.forget(lambda stamp: stamp.generation < since)
        self.look(finished, generation, every=True)
        self.sound.free_unfit()
        self.shelf.fresh(FRESH_S)

    def look(self, finished: int, generation: int = 0, *, every: bool = False) -> bool:
        """Compare new snapshots by `Soundness.look`. generation: a newer one, if this node is in one now."""
        self.generation = max(self.generation, generation)
        self._refuse_the_left(self.shelf.seen.durable)
        return self.sound.look(self.generation, finished, every=every)

    def want_newest_on_disk(self) -> None:
        """Mark the newest whole snapshot in memory for the disk, unless the disk has one as new. No rank may be alive."""
        settle(self.slots, sys.maxsize)
        newest = max(self.memory(), default=None)
        if newest is None or newest.step <= max(self.durable_steps(), default=-1):
            return
        for slot in chain(*self.slots):
            if slot.header().whole and slot.header().stamp == newest:
                slot.want_durable()

    def went_back(self, rewinds: Sequence[InPlaceRewind]) -> None:
        """Discard snapshots of the steps that these rewinds in place have undone: they no longer belong to the lineage."""
        for rewind in rewinds:
            life = (rewind.generation, rewind.ordinal)
            if self.copies:
                self.copies.forget(lambda stamp, to=rewind.to, life=life: stamp.step > to and stamp[:2] < life)  # type: ignore[misc]
            self._set_aside(rewind.to, life)
            self.sound.went_back(rewind.to, *life)

    def fetches(self, stamp: Stamp, generation: int) -> None:
        """Note that this node's part of a snapshot comes from another node, for that generation."""
        self._fetched[stamp] = generation

    def room(self) -> int:
        """The most bytes of memory that a snapshot of one rank takes."""
        headers = [slot.header() for slot in chain(*self.slots)]
        return max((header.end for header in headers if header.whole), default=0)

    def memory(self) -> list[Stamp]:
        """Snapshots in memory that the ranks can go on from, ascending."""
        return self.sound.memory()

    def live_steps(self) -> list[int]:
        """Steps of states that only the present processes can go back to, so that they never go to disk."""
        return [header.step for slot in chain(*self.slots) if (header := slot.header()).state is State.LIVE]

    def durable_steps(self) -> list[int]:
        """Steps on disk that are committed and not rejected, ascending."""
        seen = self.shelf.seen.durable
        there = ((step, name) for step, name in seen if name not in self.unfit and self._was_left(name) is None)
        return sorted({step for step, name in there if self.sound.fit(name)})

    def reject(self, name: str, reason: str) -> None:
        """Ignore a damaged snapshot, or one that left the lineage, from now on, and mark it as rejected in storage. Raises ResilientError
        if storage refuses the mark, or does not answer at once."""
        self.unfit.add(name)
        self._urgent.do(lambda: _reject(self.root / paths.SNAPSHOTS / name, reason), FRESH_S)
        self.shelf.fresh(FRESH_S)

    def _set_aside(self, to: int, life: tuple[int, int]) -> None:
        """Reject snapshots on disk of later steps than `to`, of generations and rewinds before `life`. This also holds for later ones: a
        node that was cut off, or stopped, may commit one when it is back."""
        self._left.append((to, life))
        self._refuse_the_left(self.shelf.fresh(FRESH_S).durable)

    def _was_left(self, name: str) -> int | None:
        """The step that the training went back to when it left this snapshot's lineage; None: it did not leave it."""
        attempt = Attempt.parse(name)
        if attempt is None:
            return None
        return next((to for to, life in self._left if attempt.stamp.left(to, life)), None)

    def _refuse_the_left(self, durable: Sequence[tuple[int, str]]) -> None:
        for _, name in durable:
            if name in self.unfit or (to := self._was_left(name)) is None:
                continue
            try:
                self.reject(name, f"the training has gone back to step {to} and taken another course")
            except ResilientError as error:
                left = f"{error}: the snapshot {name}, of a course that was left, keeps its name, and is not used"
                self.sound.sentences.append((left, "bad"))


def _reject(snapshot: Place, reason: str) -> None:
    if commit.committed(snapshot):
        commit.reject(snapshot, reason)
