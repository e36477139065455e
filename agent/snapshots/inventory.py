"""The snapshots that this node holds in memory and on disk, and which of them its ranks may restore.

    arena slots, Shelf (snapshots on disk), Soundness (which are fit), Copies (of another node's) ──▶ Holdings ──▶ steps for the status

When the training goes back to a snapshot, each of these discards the steps that no longer belong to the lineage.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

from ...checkpoint.arena.arena import Slot, settle
from ...checkpoint.arena.slot_header import Stamp, State
from ...checkpoint.backend import paths
from ...checkpoint.backend.paths import Attempt
from ...checkpoint.backend.place import Place
from ...checkpoint.durable import commit
from ...resilience.clock import monotonic_s, wall_s
from ...resilience.errors import ResilientError
from ...resilience.model.generation import GenerationRecord
from ...resilience.model.node import InPlaceRewind
from ...resilience.model.types import OrderedBy, Step
from ...resilience.plan.resume_point import StabilityPolicy
from ..buddy.buddy_client import Copies
from .durable_index import Shelf, newest
from .lineage_cuts import Cut, Cuts, before
from .storage_worker import Urgent, each
from .trust import Soundness

RETRY_S = 5.0
"""Seconds after which a mark that storage has not confirmed is written again."""
FRESH_S = 1.0
"""Seconds that storage may take to list its snapshots when an up-to-date list matters. With an outdated list, the job may lose steps, but
never resumes from a wrong state. The limit is shorter than a lease's lifetime."""


class Holdings:
    def __init__(
        self,
        slots: Sequence[Sequence[Slot]],
        root: Place,
        run: str,
        stability: StabilityPolicy,
        copies: Copies | None,
        window_h: float = 24.0,
    ) -> None:
        """slots: the slots (shared memory) of each local rank. root: the place that holds `snapshots/`. run: eight hexadecimal digits that
        identify this run of the job. copies: other nodes' copies in this node's memory; None: no copies. window_h: as in
        `Independence`."""
        self.slots, self.root, self.copies = slots, root, copies
        self.shelf = Shelf(root)
        self.sound = Soundness(slots, self.shelf, root, run, stability, window_h)
        self._urgent = Urgent()
        self.unfit: dict[str, str] = {}
        """Snapshots that are damaged or wrong, and why, by name. A snapshot that an order set aside is good, and not among them."""
        self._again_s: dict[str, float] = {}
        """By name of a snapshot: when its mark is written again if storage does not show it by then (monotonic)."""
        self.generation = 0
        """Number of the newest generation that this node has obeyed."""
        self.seat: tuple[int, ...] = ()
        """Node rank and number of nodes at the time of the snapshots in memory."""
        self._fetched: dict[Stamp, int] = {}
        """Snapshots that this node fetched from other nodes, which trained while it did not; and the generation of the fetch."""
        self._settled = 0
        self._ended = -1
        self._cuts = Cuts()
        self._order = 0
        """Number of the order because of which the present generation begins at `_cuts.begins`."""
        self._taking: Stamp | None = None
        """The snapshot to which an order came back, until all its marks are written; None: no marks are missing."""

    def settle(self, record: GenerationRecord, node_rank: int) -> None:
        """Free all snapshots in memory that the ranks of `record` cannot restore. Only the first call per generation does this, because
        fetched snapshots arrive afterwards. Call `settle` only while no rank is alive."""
        if self._settled == record.number:
            return
        self._settled = self.generation = record.number
        seat = (node_rank, len(record.members))
        newcomers = record.number in record.joined.values()
        back = Attempt.parse(record.begins.left) if record.begins else None
        self._order = record.begins.number if record.begins else 0
        self._cuts.begins = back.stamp if back else None
        # Ranks with other numbers cannot use this memory, nor can ranks that continue an earlier lineage.
        upto = record.resume_step if seat == self.seat and not back else -1
        settle(self.slots, upto, record.resume_course, torn=newcomers)
        self.seat = seat
        self.sound.went_back(record.resume_step, record.number)
        if record.onset >= 0:
            self._set_aside(Cut(to=record.onset - 1, life=(record.number, 0)))
        if self.copies:
            self.copies.forget(lambda stamp: stamp.step > upto and stamp.generation < record.number)
            self.copies.begin()

    def end(self, record: GenerationRecord) -> None:
        """Discard the snapshots of all steps from `record.onset` on. The job ends, those steps are wrong, and no later start may use them.
        Call `end` only while no rank is alive."""
        if record.onset < 0 or record.onset == self._ended:
            return
        self._ended = record.onset
        for slot in chain(*self.slots):
            if slot.header().whole and slot.header().step >= record.onset:
                slot.free()
        self._set_aside(Cut(to=record.onset - 1, life=(record.number + 1, 0)))

    def clear(self, generation: int, finished: int, since: int) -> None:
        """Check which snapshots the next ranks may restore. Free snapshots of generations before `since`, when this node was last absent
        and the lineage may have changed. finished: the last step that all the previous ranks have finished. Call `clear` only while no
        rank is alive."""
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
        self._mark_all()
        return self.sound.look(self.generation, finished, every=every)

    def finish_marks(self) -> None:
        """Write the marks that storage still lacks. The next run of the job knows nothing but the marks."""
        self.shelf.fresh(FRESH_S)
        self._mark_all()

    def want_newest_on_disk(self) -> None:
        """Mark the newest complete snapshot in memory to be written to disk, unless a snapshot on disk is as new. Call
        `want_newest_on_disk` only while no rank is alive."""
        settle(self.slots, sys.maxsize)
        last = max(self.memory(), default=None)
        if last is None or last.step <= max(self.durable_steps(), default=-1):
            return
        for slot in chain(*self.slots):
            if slot.header().whole and slot.header().stamp == last:
                slot.want_durable()

    def went_back(self, rewinds: Sequence[InPlaceRewind]) -> None:
        """Discard snapshots of the steps that these in-place rewinds have undone, because they no longer belong to the lineage."""
        for rewind in rewinds:
            life = (rewind.generation, rewind.ordinal)
            back = self._cuts.begins if self._order and rewind.order == self._order else None
            source = back[:2] if back else None
            cut = Cut(to=rewind.to, life=life, ordered=rewind.cause == OrderedBy.OPERATOR, source=source)
            if self.copies:
                self.copies.forget(cut.left)
            self._set_aside(cut)
            self.sound.went_back(rewind.to, *life)
            if back:
                self._cuts.returned(back)
                self._taking = back
                self._take_back(back)

    def fetches(self, stamp: Stamp, generation: int) -> None:
        """Record that this node fetches its part of a snapshot from another node, for the start of `generation`."""
        self._fetched[stamp] = generation

    def room(self) -> int:
        """Return the most bytes of memory that one rank's part of a snapshot occupies."""
        return max((header.end for slot in chain(*self.slots) if (header := slot.header()).whole), default=0)

    def memory(self) -> list[Stamp]:
        """Return the snapshots in memory from which the ranks can resume, in ascending order."""
        return self.sound.memory()

    def live_steps(self) -> list[int]:
        """Return the steps of snapshots that only the present rank processes can restore, and that never go to disk."""
        return [header.step for slot in chain(*self.slots) if (header := slot.header()).state is State.LIVE]

    def durable(self) -> list[Stamp]:
        """Return `newest` of the committed snapshots on disk that are fit to resume from."""
        return newest(name for _, name in self.shelf.seen.durable if self._usable(name))

    def durable_steps(self) -> list[int]:
        return [stamp.step for stamp in self.durable()]

    def unusable(self) -> tuple[str, ...]:
        """Return the names of committed snapshots on disk that ranks must not restore. Storage may not show their marks yet."""
        return tuple(name for _, name in self.shelf.seen.durable if not self._usable(name))

    def rejected_steps(self) -> tuple[Step, ...]:
        """Return the steps of all snapshots on disk that are set aside, with or without a mark."""
        return tuple(sorted({*self.shelf.seen.rejected, *(Step(it.step) for it in newest(self.unusable()))}))

    def _usable(self, name: str) -> bool:
        return name not in self.unfit and self._cuts.of(name) is None and self.sound.fit(name)

    def reject(self, name: str, reason: str) -> None:
        """From now on, ignore a snapshot that is damaged or left the lineage, and mark it as rejected in storage. Raises ResilientError if
        storage refuses the mark, or does not answer within FRESH_S."""
        self.unfit[name] = reason
        self._mark(lambda: commit.reject(self.root / paths.SNAPSHOTS / name, reason, wall_s()))

    def sees(self, left: str) -> bool:
        """Whether an order can come back to this snapshot, which an earlier order left. Another agent may already have taken it back."""
        there = {*self.shelf.seen.left, *(name for _, name in self.shelf.seen.durable)}
        return left in there and left not in self.unfit and self.sound.fit(left)

    def _mark(self, act: Callable[[], None]) -> None:
        try:
            self._urgent.do(act, FRESH_S)
        finally:
            self.shelf.fresh(FRESH_S)

    def _set_aside(self, cut: Cut) -> None:
        """Set aside the snapshots on disk that `cut` left. The rule stays in force: a node that was cut off or stopped may commit such a
        snapshot when it returns."""
        self._cuts.note(self.shelf.fresh(FRESH_S))
        self._cuts.made.append(cut)
        self._again_s.clear()
        if self._taking and cut.left(self._taking):
            self._taking = None
        self._mark_all()

    def _mark_all(self) -> None:
        """Write the marks that storage lacks."""
        seen = self.shelf.seen  # once: another thread replaces it
        for why in seen.unread:
            sentence = f"{why}: this snapshot is left alone, and no restart uses it until storage shows it again"
            self.sound.say_once(why, sentence, "bad")
        self._cuts.note(seen)
        self._refuse_the_left(seen.durable)
        if self._taking:
            self._take_back(self._taking)

    def _due(self, name: str) -> bool:
        """Whether to write this snapshot's mark now. If storage has refused it, or hangs, it is written again later."""
        again_s = self._again_s.get(name)
        if again_s is not None and (self._urgent.busy() or monotonic_s() < again_s):
            return False
        self._again_s[name] = monotonic_s() + RETRY_S
        return True

    def _refuse_the_left(self, durable: Sequence[tuple[int, str]]) -> None:
        acts: dict[str, Callable[[], None]] = {}
        for _, name in durable:
            cut, place = self._cuts.of(name), self.root / paths.SNAPSHOTS / name
            why = self.unfit.get(name) or (cut.why if cut else "")
            good = cut is not None and cut.ordered and name not in self.unfit and self.sound.fit(name)
            if not why or (good and cut and self._waits(cut, durable)) or not self._due(name):
                continue
            if not good:
                self.unfit[name] = why
            acts[name] = (
                partial(commit.leave, place, why, wall_s()) if good else partial(commit.reject, place, why, wall_s())
            )
        if not acts:
            return
        try:
            # In one task: the agent's loop waits for it, and must renew its lease.
            self._mark(lambda: each(acts.values()))
        except ResilientError as error:
            left = "not marked as set aside yet. This agent does not use them, and tries again"
            self.sound.say_once(str(error), f"{error}: snapshots that the training has left are {left}", "bad")

    def _waits(self, cut: Cut, durable: Sequence[tuple[int, str]]) -> bool:
        """Whether the state to which an order went back is in memory only: until this state is on disk, nothing is marked. So a job that
        loses all its memory meanwhile can resume from the newer snapshots."""
        return cut.source is None and not any(step >= cut.to and self._usable(name) for step, name in durable)

    def _take_back(self, back: Stamp) -> None:
        """Take back the snapshot from which the ranks have begun, and its predecessors. First set aside other snapshots to which orders
        came back: they need not belong to this lineage. Do nothing while snapshots that do not belong to this lineage are not marked yet: a
        restart would mix the two lineages."""
        seen, where, cut = self.shelf.seen, self.root / paths.SNAPSHOTS, self._cuts.made[-1]
        durable = {name for _, name in seen.durable}
        own = before({*durable, *seen.left}, back)
        if any(self._cuts.of(name) for name in durable - own) or not self._due(_COMING_BACK):
            return

        def act() -> None:
            for name in durable - own:
                if commit.returned(where / name):
                    commit.leave(where / name, cut.why, wall_s())
            again = sorted(own & seen.left, reverse=True)  # first the snapshot itself
            each([partial(commit.take_back, where / name) for name in again])

        try:
            self._mark(act)
            self._taking = None
        except ResilientError as error:
            said = "is still set aside, or one before it is. No restart uses it yet; the agent tries again"
            self.sound.say_once(_COMING_BACK, f"{error}: the snapshot of step {back.step} {said}", "bad")


_COMING_BACK = "coming back"
