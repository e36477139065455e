"""The snapshots that this node holds in memory and on disk, and which of them its ranks may restore.

    arena slots, Shelf (snapshots on disk), Soundness (which are fit), Copies (of another node's) ──▶ Holdings ──▶ steps for the status

When the training goes back to a snapshot, each of these discards the steps that no longer belong to the lineage.
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
"""Seconds that storage may take to list its snapshots when an up-to-date list matters. With an outdated list, the job may lose steps, but
never resumes from a wrong state. The limit is shorter than a lease's lifetime."""


class Holdings:
    def __init__(
        self, slots: Sequence[Sequence[Slot]], root: Place, run: str, stability: StabilityPolicy, copies: Copies | None
    ) -> None:
        """slots: the slots (shared memory) of each local rank. root: the place that holds `snapshots/`. run: eight hexadecimal digits that
        identify this run of the job. copies: other nodes' copies in this node's memory; None: no copies."""
        self.slots, self.root, self.copies = slots, root, copies
        self.shelf = Shelf(root)
        self.sound = Soundness(slots, self.shelf, root, run, stability)
        self._urgent = Urgent()
        self.unfit: set[str] = set()
        """Names of snapshots that are damaged, or that left the lineage."""
        self.generation = 0
        """Number of the newest generation that this node has obeyed."""
        self.seat: tuple[int, ...] = ()
        """Node rank and number of nodes at the time of the snapshots in memory."""
        self._fetched: dict[Stamp, int] = {}
        """Snapshots that came from other nodes, and the generation for which this node fetched them. Those nodes trained while this node
        did not."""
        self._settled = 0
        self._ended = -1
        self._left: list[tuple[int, tuple[int, int]]] = []
        """Steps to which the training went back. Each has the generation and rewind number under which the lineage continues."""

    def settle(self, record: GenerationRecord, node_rank: int) -> None:
        """Free all snapshots in memory that the ranks of `record` cannot restore. Only the first call per generation does this, because
        fetched snapshots arrive afterwards. Call it only while no rank is alive."""
        if self._settled == record.number:
            return
        self._settled = self.generation = record.number
        seat = (node_rank, len(record.members))
        newcomers = record.number in record.joined.values()
        upto = record.resume_step if seat == self.seat else -1  # ranks with other numbers cannot use this memory
        settle(self.slots, upto, torn=newcomers)
        self.seat = seat
        self.sound.went_back(record.resume_step, record.number)
        if record.onset >= 0:
            self._set_aside(record.onset - 1, (record.number, 0))
        if self.copies:
            self.copies.forget(lambda stamp: stamp.step > record.resume_step and stamp.generation < record.number)
            self.copies.begin()

    def end(self, record: GenerationRecord) -> None:
        """Discard the snapshots of all steps from `record.onset` on. The job ends, those steps are wrong, and no later start may use them.
        Call it only while no rank is alive."""
        if record.onset < 0 or record.onset == self._ended:
            return
        self._ended = record.onset
        for slot in chain(*self.slots):
            if slot.header().whole and slot.header().step >= record.onset:
                slot.free()
        self._set_aside(record.onset - 1, (record.number + 1, 0))

    def clear(self, generation: int, finished: int, since: int) -> None:
        """Check which snapshots the next ranks may restore. Free snapshots of generations before `since`, when this node was last absent
        and the lineage may have changed. finished: the last step that all the previous ranks have finished. Call it only while no rank is
        alive."""
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
        """Compare new snapshots with `Soundness.look`, and return its result. generation: number of this node's generation, if it is newer
        than the known one."""
        self.generation = max(self.generation, generation)
        self._refuse_the_left(self.shelf.seen.durable)
        return self.sound.look(self.generation, finished, every=every)

    def want_newest_on_disk(self) -> None:
        """Mark the newest complete snapshot in memory to be written to disk, unless a snapshot on disk is as new. Call it only while no
        rank is alive."""
        settle(self.slots, sys.maxsize)
        newest = max(self.memory(), default=None)
        if newest is None or newest.step <= max(self.durable_steps(), default=-1):
            return
        for slot in chain(*self.slots):
            if slot.header().whole and slot.header().stamp == newest:
                slot.want_durable()

    def went_back(self, rewinds: Sequence[InPlaceRewind]) -> None:
        """Discard snapshots of the steps that these in-place rewinds have undone, because they no longer belong to the lineage."""
        for rewind in rewinds:
            life = (rewind.generation, rewind.ordinal)
            if self.copies:
                self.copies.forget(lambda stamp, to=rewind.to, life=life: stamp.step > to and stamp[:2] < life)  # type: ignore[misc]
            self._set_aside(rewind.to, life)
            self.sound.went_back(rewind.to, *life)

    def fetches(self, stamp: Stamp, generation: int) -> None:
        """Record that this node fetches its part of a snapshot from another node, for the start of `generation`."""
        self._fetched[stamp] = generation

    def room(self) -> int:
        """Return the most bytes of memory that one rank's part of a snapshot occupies."""
        headers = [slot.header() for slot in chain(*self.slots)]
        return max((header.end for header in headers if header.whole), default=0)

    def memory(self) -> list[Stamp]:
        """Return the snapshots in memory from which the ranks can resume, in ascending order."""
        return self.sound.memory()

    def live_steps(self) -> list[int]:
        """Return the steps of snapshots that only the present rank processes can restore. These snapshots never go to disk."""
        return [header.step for slot in chain(*self.slots) if (header := slot.header()).state is State.LIVE]

    def durable_steps(self) -> list[int]:
        """Return the steps of committed snapshots on disk that are fit to resume from, in ascending order."""
        seen = self.shelf.seen.durable
        there = ((step, name) for step, name in seen if name not in self.unfit and self._was_left(name) is None)
        return sorted({step for step, name in there if self.sound.fit(name)})

    def reject(self, name: str, reason: str) -> None:
        """From now on, ignore a snapshot that is damaged or left the lineage, and mark it as rejected in storage. Raises ResilientError if
        storage refuses the mark, or does not answer within FRESH_S."""
        self.unfit.add(name)
        self._urgent.do(lambda: _reject(self.root / paths.SNAPSHOTS / name, reason), FRESH_S)
        self.shelf.fresh(FRESH_S)

    def _set_aside(self, to: int, life: tuple[int, int]) -> None:
        """Reject snapshots on disk of steps after `to` whose generation and rewind number are lower than `life`. The rule stays in force: a
        node that was cut off or stopped may commit such a snapshot when it returns."""
        self._left.append((to, life))
        self._refuse_the_left(self.shelf.fresh(FRESH_S).durable)

    def _was_left(self, name: str) -> int | None:
        """Return the step to which the training went back when it left this snapshot's lineage. None: the snapshot still belongs to the
        lineage."""
        attempt = Attempt.parse(name)
        if attempt is None:
            return None
        return next((to for to, life in self._left if attempt.stamp.left(to, life)), None)

    def _refuse_the_left(self, durable: Sequence[tuple[int, str]]) -> None:
        for _, name in durable:
            if name in self.unfit or (to := self._was_left(name)) is None:
                continue
            try:
                self.reject(
                    name,
                    f"the training has gone back to step {to}, and this snapshot does not belong to its lineage any more",
                )
            except ResilientError as error:
                left = f"{error}: the snapshot {name} left the lineage. It is not marked as rejected yet, but this agent does not use it"
                self.sound.sentences.append((left, "bad"))


def _reject(snapshot: Place, reason: str) -> None:
    if commit.committed(snapshot):
        commit.reject(snapshot, reason)
