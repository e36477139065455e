"""What this node holds of the training, in memory and on disk, and what of that its ranks may go back to.

    arena slots, Shelf (what is on disk), Soundness (what it is worth), Copies (of another node's) ──▶ Holdings ──▶ steps for the status

Where the training takes another course, all of them let go of the steps that it leaves behind.
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
"""How long storage may take to say what it holds where that matters; a stale answer costs steps, never bits. Less than a lease."""


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
        """Names of snapshots that are damaged."""
        self.generation = 0
        """Of the newest record that this node has obeyed."""
        self.seat: tuple[int, ...] = ()
        """Node rank, and number of nodes, of the ranks whose snapshots memory holds."""
        self._fetched: dict[Stamp, int] = {}
        """What came from other nodes, for which generation: they have had a part in the training while this one had none."""
        self._settled = 0
        self._ended = -1
        self._left: list[tuple[int, tuple[int, int]]] = []
        """Steps that the training went back to, and the generation and rewind since which it takes another course."""

    def settle(self, record: GenerationRecord, node_rank: int) -> None:
        """Keep what the ranks of `record` can go back to, and nothing else; once, for what is fetched comes after it. No rank may be
        alive."""
        if self._settled == record.number:
            return
        self._settled = self.generation = record.number
        seat = (node_rank, len(record.members))
        newcomers = record.number in record.joined.values()
        upto = record.resume_step if seat == self.seat else -1  # of other ranks it is of no use
        settle(self.slots, upto, torn=newcomers)
        self.seat = seat
        self.sound.went_back(record.resume_step, record.number)
        if record.onset >= 0:
            self._set_aside(record.onset - 1, (record.number, 0))
        if self.copies:
            self.copies.forget(lambda stamp: stamp.step > record.resume_step and stamp.generation < record.number)
            self.copies.begin()

    def end(self, record: GenerationRecord) -> None:
        """The job ends, and what it has computed since `record.onset` is wrong: nobody is to go on from it. No rank may be alive."""
        if record.onset < 0 or record.onset == self._ended:
            return
        self._ended = record.onset
        for slot in chain(*self.slots):
            if slot.header().whole and slot.header().step >= record.onset:
                slot.free()
        self._set_aside(record.onset - 1, (record.number + 1, 0))

    def clear(self, generation: int, finished: int, since: int) -> None:
        """A look at what the next ranks may go on from: nothing of generations before `since`, while this node had no part in the
        training. finished: step that all the ranks before them have done. No rank may be alive."""
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
        """`Soundness.look`. generation: a newer one that this node is in now."""
        self.generation = max(self.generation, generation)
        self._refuse_the_left(self.shelf.seen.durable)
        return self.sound.look(self.generation, finished, every=every)

    def want_newest_on_disk(self) -> None:
        """The newest that memory holds whole, where the disk has nothing as new. No rank may be alive."""
        settle(self.slots, sys.maxsize)
        newest = max(self.memory(), default=None)
        if newest is None or newest.step <= max(self.durable_steps(), default=-1):
            return
        for slot in chain(*self.slots):
            if slot.header().whole and slot.header().stamp == newest:
                slot.want_durable()

    def went_back(self, rewinds: Sequence[InPlaceRewind]) -> None:
        """What was written of the steps that the ranks have gone back behind, in place, is of another course of the training."""
        for rewind in rewinds:
            life = (rewind.generation, rewind.ordinal)
            if self.copies:
                self.copies.forget(lambda stamp, to=rewind.to, life=life: stamp.step > to and stamp[:2] < life)  # type: ignore[misc]
            self._set_aside(rewind.to, life)
            self.sound.went_back(rewind.to, *life)

    def fetches(self, stamp: Stamp, generation: int) -> None:
        """This node's part of it comes from another one, for that generation."""
        self._fetched[stamp] = generation

    def room(self) -> int:
        """Bytes of memory that a snapshot of one rank takes, at most."""
        headers = [slot.header() for slot in chain(*self.slots)]
        return max((header.end for header in headers if header.whole), default=0)

    def memory(self) -> list[Stamp]:
        """What the ranks can go on from in memory, ascending."""
        return self.sound.memory()

    def live_steps(self) -> list[int]:
        """Of states that no disk ever had, for no new process could take them."""
        return [header.step for slot in chain(*self.slots) if (header := slot.header()).state is State.LIVE]

    def durable_steps(self) -> list[int]:
        """Committed and not rejected, ascending."""
        seen = self.shelf.seen.durable
        there = ((step, name) for step, name in seen if name not in self.unfit and self._was_left(name) is None)
        return sorted({step for step, name in there if self.sound.fit(name)})

    def reject(self, name: str, reason: str) -> None:
        """Take a damaged snapshot out of the world; where storage does not let us, or not at once (ResilientError), out of our own."""
        self.unfit.add(name)
        self._urgent.do(lambda: _reject(self.root / paths.SNAPSHOTS / name, reason), FRESH_S)
        self.shelf.fresh(FRESH_S)

    def _set_aside(self, to: int, life: tuple[int, int]) -> None:
        """What is on disk of later steps than `to`, of generations and rewinds before `life`; and what will be: a node that was cut off,
        or stopped, may commit it when it is back."""
        self._left.append((to, life))
        self._refuse_the_left(self.shelf.fresh(FRESH_S).durable)

    def _was_left(self, name: str) -> int | None:
        """To which step the training went back to take another course than the one that this snapshot is of; None: to none."""
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
