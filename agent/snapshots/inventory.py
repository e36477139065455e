"""The snapshots that this node holds in memory and on disk, and which of them its ranks may restore.

    arena slots, Shelf (snapshots on disk), Soundness (which are fit), Copies (of another node's) ──▶ Holdings ──▶ steps for the status

When the training goes back to a snapshot, each of these discards the steps that no longer belong to the lineage.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from ...checkpoint.arena.arena import Slot
from ...checkpoint.arena.group_cleanup import settle
from ...checkpoint.arena.slot_header import Stamp, State
from ...checkpoint.backend import paths
from ...checkpoint.backend.paths import Attempt
from ...checkpoint.backend.place import Place
from ...checkpoint.durable import commit
from ...resilience.clock import wall_s
from ...resilience.errors import ResilientError
from ...resilience.model.generation import GenerationRecord
from ...resilience.model.node import InPlaceRewind
from ...resilience.model.types import OrderedBy
from ...resilience.plan.resume_point import StabilityPolicy
from ..buddy.buddy_client import Copies
from .durable_index import Shelf
from .storage_worker import Urgent
from .trust import Soundness

FRESH_S = 1.0
"""Seconds that storage may take to list its snapshots when an up-to-date list matters. With an outdated list, the job may lose steps, but
never resumes from a wrong state. The limit is shorter than a lease's lifetime."""


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """The training went back, and left steps of its lineage."""

    to: int
    life: tuple[int, int]
    """Numbers of generation and rewinds under which the lineage continues."""
    ordered: bool = False
    """Whether a person ordered it. Then the states that were left are good."""
    source: tuple[int, int] | None = None
    """If an order came back to a snapshot of an earlier lineage: its numbers of generation and rewinds. Snapshots between them and `life`
    do not belong to the lineage, whatever their step."""

    def left(self, stamp: Stamp) -> bool:
        return stamp.left(self.to, self.life) or (self.source is not None and self.source < stamp[:2] < self.life)

    @property
    def why(self) -> str:
        who = "an order" if self.ordered else "the training"
        what = "came back to a snapshot of step" if self.source else "went back to step"
        return f"{who} {what} {self.to}, and this snapshot does not belong to the lineage any more"


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
        self.unfit: set[str] = set()
        """Names of snapshots that are damaged, or that left the lineage. Those that an order left are in `_told`."""
        self._told: set[str] = set()
        self.generation = 0
        """Number of the newest generation that this node has obeyed."""
        self.seat: tuple[int, ...] = ()
        """Node rank and number of nodes at the time of the snapshots in memory."""
        self._fetched: dict[Stamp, int] = {}
        """Snapshots that came from other nodes, and the generation for which this node fetched them. Those nodes trained while this node
        did not."""
        self._settled = 0
        self._ended = -1
        self._cuts: list[_Cut] = []
        self._back: tuple[int, Stamp] | None = None
        """Number of the order because of which the present generation comes back to a snapshot that an earlier order left, and that
        snapshot."""
        self._returned: list[tuple[Stamp, int]] = []
        """Snapshots to which orders came back, and how many of `_cuts` do not concern them and their predecessors any more."""

    def settle(self, record: GenerationRecord, node_rank: int) -> None:
        """Free all snapshots in memory that the ranks of `record` cannot restore. Only the first call per generation does this, because
        fetched snapshots arrive afterwards. Call it only while no rank is alive."""
        if self._settled == record.number:
            return
        self._settled = self.generation = record.number
        seat = (node_rank, len(record.members))
        newcomers = record.number in record.joined.values()
        back = Attempt.parse(record.begins.left) if record.begins else None
        self._back = (record.begins.number, back.stamp) if record.begins and back else None
        # Ranks with other numbers cannot use this memory, nor can ranks that continue an earlier lineage.
        upto = record.resume_step if seat == self.seat and not back else -1
        settle(self.slots, upto, torn=newcomers)
        self.seat = seat
        self.sound.went_back(record.resume_step, record.number)
        if record.onset >= 0:
            self._set_aside(_Cut(to=record.onset - 1, life=(record.number, 0)))
        if self.copies:
            self.copies.forget(lambda stamp: stamp.step > upto and stamp.generation < record.number)
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
        self._set_aside(_Cut(to=record.onset - 1, life=(record.number + 1, 0)))

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
            back = self._back[1] if self._back and rewind.order == self._back[0] else None
            source = back[:2] if back else None
            cut = _Cut(to=rewind.to, life=life, ordered=rewind.cause == OrderedBy.OPERATOR, source=source)
            if self.copies:
                self.copies.forget(cut.left)
            self._set_aside(cut)
            self.sound.went_back(rewind.to, *life)
            if back:
                self._come_back(back)

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
        there = ((step, name) for step, name in seen if name not in self.unfit and self._cut_of(name) is None)
        return sorted({step for step, name in there if self.sound.fit(name)})

    def reject(self, name: str, reason: str) -> None:
        """From now on, ignore a snapshot that is damaged or left the lineage, and mark it as rejected in storage. Raises ResilientError if
        storage refuses the mark, or does not answer within FRESH_S."""
        self.unfit.add(name)
        self._mark(lambda: _reject(self.root / paths.SNAPSHOTS / name, reason))

    def sees(self, left: str) -> bool:
        """Whether an order can come back to this snapshot, which an earlier order left."""
        return left in self.shelf.seen.left and left not in self.unfit

    def _mark(self, act: Callable[[], None]) -> None:
        self._urgent.do(act, FRESH_S)
        self.shelf.fresh(FRESH_S)

    def _set_aside(self, cut: _Cut) -> None:
        """Set aside the snapshots on disk that `cut` left. The rule stays in force: a node that was cut off or stopped may commit such a
        snapshot when it returns."""
        self._cuts.append(cut)
        self._refuse_the_left(self.shelf.fresh(FRESH_S).durable)

    def _cut_of(self, name: str) -> _Cut | None:
        """Return how the training left this snapshot's lineage. None: the snapshot still belongs to the lineage."""
        attempt = Attempt.parse(name)
        if attempt is None:
            return None
        if self._back and _precedes(attempt.stamp, self._back[1]):
            return None
        past = max((number for back, number in self._returned if _precedes(attempt.stamp, back)), default=0)
        return next((cut for cut in self._cuts[past:] if cut.left(attempt.stamp)), None)

    def _refuse_the_left(self, durable: Sequence[tuple[int, str]]) -> None:
        for _, name in durable:
            if name in self.unfit or name in self._told or (cut := self._cut_of(name)) is None:
                continue
            try:
                if cut.ordered and self.sound.fit(name):
                    self._told.add(name)
                    place = self.root / paths.SNAPSHOTS / name
                    self._mark(lambda place=place, why=cut.why: commit.leave(place, why, wall_s()))  # type: ignore[misc]
                else:
                    self.reject(name, cut.why)
            except ResilientError as error:
                left = f"{error}: the snapshot {name} left the lineage. It is not marked as rejected yet, but this agent does not use it"
                self.sound.sentences.append((left, "bad"))

    def _come_back(self, back: Stamp) -> None:
        """Take back the snapshot from which the ranks have just begun, and its predecessors. First set aside other snapshots to which
        orders came back before: they need not belong to this lineage."""
        self._returned.append((back, len(self._cuts)))
        self._back = None
        where, cut, seen = self.root / paths.SNAPSHOTS, self._cuts[-1], self.shelf.seen
        durable = {name for _, name in seen.durable}
        own = {name for name in (*durable, *seen.left) if (at := Attempt.parse(name)) and _precedes(at.stamp, back)}
        self._told -= own
        others, taken = durable - own, sorted(own & seen.left)

        def act() -> None:
            for name in others:
                if commit.returned(where / name):
                    commit.leave(where / name, cut.why, wall_s())
            for name in taken:
                commit.take_back(where / name)

        try:
            self._mark(act)
        except ResilientError as error:
            said = f"{error}: the snapshot of step {back.step} is still marked as set aside, and no restart uses it"
            self.sound.sentences.append((said, "bad"))


def _precedes(stamp: Stamp, back: Stamp) -> bool:
    """Whether the same ranks computed this step before that one, or it is the same."""
    return stamp[:2] == back[:2] and stamp.step <= back.step


def _reject(snapshot: Place, reason: str) -> None:
    if commit.committed(snapshot) or snapshot.there(paths.LEFT):
        commit.reject(snapshot, reason)
