"""Checks whether this node's data-parallel ranks still hold the same bits, by the fingerprints of newly sealed snapshots.

    slots, or manifests on disk ──▶ tables, fingerprints ──`replica_ledger.Ledger`──▶ agreed, or diverged ──▶ `Mismatch`, unfit snapshots

The check does not disturb the ranks: the agent reads fingerprints without a lock. Normally the agent compares the newest snapshot every
LOOK_S seconds, and each snapshot that goes to disk. Before a snapshot is chosen for a restore, the agent compares all snapshots in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from ...checkpoint.arena.arena import Slot
from ...checkpoint.arena.slot_header import Stamp, complete
from ...checkpoint.format import replica_agreement
from ...checkpoint.format.replica_ledger import Apart, Ledger
from ...checkpoint.format.tensor_table import Table
from ...resilience.detect.node_divergence import KEPT
from ...resilience.errors import SnapshotError
from ...resilience.model.signals import Held, Mismatch, Snapshot
from ...resilience.model.types import Generation, Rank, Step
from ...resilience.plan.resume_point import StabilityPolicy, stable
from .fingerprint_source import Sight, seen
from .frozen_check import Stillness
from .independence import Early, Independence

LOOK_S = 1.0
TOLD = 5
"""The most tensors that a mismatch names, and the most mismatches that a status reports."""
REMEMBERED = 4096
"""How many of the latest compared snapshots are remembered."""


@dataclass
class Bad:
    """Replicas have diverged: snapshots from `first` on are unfit."""

    first: Stamp
    cure: int | None = None
    """Snapshots with at least this many rewinds are fit again, because the same ranks had gone back to a step before `first`. None: the
    ranks have not gone back that far."""

    def cured(self, stamp: Stamp) -> bool:
        return self.cure is not None and stamp.rewinds >= self.cure


class Replicas:
    """The agent's knowledge of which replicas agree. The knowledge is lost when the agent exits. Only one thread may use it."""

    def __init__(self, slots: Sequence[Sequence[Slot]], policy: StabilityPolicy, window_h: float = 24.0) -> None:
        """window_h: as in `Independence`."""
        self._slots, self._policy = slots, policy
        self._thread = ThreadPoolExecutor(1)  # parsing the tables of large models takes long
        self._layouts: list[tuple[tuple[bytes, ...], Future[_Layout]]] = []
        self._looked_s = -LOOK_S
        self._agreed: dict[Stamp, bool] = {}
        self._line: set[Stamp] = set()
        """Agreed snapshots that belong to the lineage of the present state."""
        self._certified: set[Stamp] = set()
        self._bad: dict[int, list[Bad]] = {}
        """Divergences, by generation of the ranks."""
        self._disputes: dict[int, tuple[int, list[Apart]]] = {}
        """By step: mismatches whose wrong rank is not known, each with its index in `mismatches`, and the fingerprints that the ranks
        had."""
        self._independence = Independence(window_h)
        self.early: Early | None = None
        """Optimizer moments that replicas have never held alike. At first those that were found first; later those that ended the
        comparison."""
        self.again: Early | None = None
        """The last tensors that are no longer compared, because a replay gave each rank the same differing bits again."""
        self.left = Step(-1)
        """Step from which replicas are no longer compared, because the script trains each rank independently; -1: they are compared."""
        self._stillness = Stillness()
        self._held: dict[Snapshot, int] = {}
        """The digests (combined fingerprints) of the latest snapshots that all nodes compare."""
        self._model = ""
        """The model that these digests belong to."""
        self._left: list[tuple[int, tuple[int, int]]] = []
        """Steps to which the ranks went back, each with the generation and rewind number under which the lineage continues."""
        self.mismatches: tuple[Mismatch, ...] = ()
        self.frozen = Step(-1)

    # -- looking ---------------------------------------------------------------------------------------------------------

    def look(self, now_s: float, wall_s: float, generation: int, *, every: bool = False) -> bool:
        """Compare sealed snapshots: those for the disk, and the newest if LOOK_S seconds have passed; with `every`, all of them. Return
        True if a new mismatch was found. now_s: monotonic. generation: the generation that the node is in."""
        headers = [[slot.header() for slot in row] for row in self._slots]
        held = complete(headers, len(self._slots)) - self._agreed.keys()
        chosen = set(held)
        if not every:
            wanted = {header.stamp for row in headers for header in row if header.durable or header.marked}
            chosen = {stamp for stamp in held if stamp in wanted or stamp.step in self._disputes}
            if held and now_s - self._looked_s >= LOOK_S:
                self._looked_s = now_s
                chosen.add(max(held))
        return self.judge(self._sights(chosen), wall_s, generation, rest=self._sights(held - chosen), wait=every)

    def judge(
        self,
        sights: Iterable[Sight],
        wall_s: float,
        generation: int,
        *,
        rest: Iterable[Sight] = (),
        wait: bool = True,
    ) -> bool:
        """Compare the snapshots in `sights` that were not compared before. If replicas diverge in one of them, compare `rest` too: the
        first divergence may be older. Return True if a new mismatch was found. wait: also wait for layouts that are still being parsed."""
        apart = self._apart(sights, wait, wall_s)
        apart += self._apart(rest, True, wall_s) if apart else []
        return self._told(sorted(apart, key=lambda each: each[0].stamp), wall_s, generation)

    def _sights(self, stamps: Iterable[Stamp]) -> Iterator[Sight]:
        return (sight for stamp in sorted(stamps) if (sight := seen(self._slots, stamp)))

    def _apart(self, sights: Iterable[Sight], wait: bool, wall_s: float) -> list[tuple[Sight, list[Apart]]]:
        fresh = (sight for sight in sights if sight.stamp not in self._agreed)
        return [(sight, found) for sight in fresh if (found := self._compare(sight, wait, wall_s))]

    def _compare(self, sight: Sight, wait: bool, wall_s: float) -> list[Apart] | None:
        """Return the snapshot's tensors that differ between replicas. None: its layout is not parsed yet, and `wait` is False."""
        layout = self._layout(sight.tables, wait)
        if layout is None:
            return None
        layout = layout if layout.fits(sight) else _Layout.of((), len(sight.words))
        ledger = layout.ledger
        found = ledger.look(sight.words)
        if ledger.early and (self.early is None or self.early.blind < ledger.blind):
            self.early = Early(Step(sight.stamp.step), ledger.early, ledger.blind)
        if ledger.parted and self._independence.shown(sight.stamp, found, self._agreed, wall_s):
            ledger.leave()
            self.left, found = Step(sight.stamp.step), []
        elif again := self._independence.again(sight.stamp, found):
            ledger.leave(again)
            self.again = Early(Step(sight.stamp.step), again, ledger.blind)
            found = [each for each in found if each.name not in again]
        self._agreed[sight.stamp] = not found
        for old in list(self._agreed)[:-REMEMBERED]:
            del self._agreed[old]
            self._line.discard(old)
            self._certified.discard(old)
        if not found:
            if not (ledger.blind or self.again):
                self._line.add(sight.stamp)
            self._convict(sight, ledger)
            self._hold(sight, layout.digest)
        self.frozen = self._stillness.look(sight, layout.parameters)
        return found

    def _layout(self, tables: tuple[bytes, ...], wait: bool) -> _Layout | None:
        future = next((future for known, future in self._layouts if known == tables), None)
        if future is None:
            future = self._thread.submit(_Layout.read, tables)
            self._layouts = [
                *self._layouts[-3:],
                (tables, future),
            ]  # the layout at a start differs from the layout after a step
        return future.result() if wait or future.done() else None

    def _hold(self, sight: Sight, digest: replica_agreement.Digest | None) -> None:
        """Keep the snapshot's digest. Other nodes whose ranks are replicas of this node's ranks must report the same digest."""
        left = any(sight.stamp.left(to, life) for to, life in self._left)  # it was read from disk after the rewind
        unwanted = self.again or self.left >= 0  # the digest contains tensors that are no longer compared
        if not digest or not sight.everywhere or left or unwanted or not self._policy.compare_nodes:
            return
        if digest.model != self._model:
            self._model, self._held = digest.model, {}
        self._held[sight.stamp] = digest.of(sight.words)
        self._held = dict(sorted(self._held.items())[-KEPT:])

    # -- judging ----------------------------------------------------------------------------------------------------------

    def _told(self, apart: list[tuple[Sight, list[Apart]]], wall_s: float, generation: int) -> bool:
        """Record the first divergence in each generation, and the first after each cure, as a mismatch. Return True if there is a new
        one."""
        news = False
        for sight, found in apart:
            if not self.fit(sight.stamp):
                continue
            found_before = self._bad.setdefault(sight.stamp.generation, [])
            same = next((bad for bad in found_before if not bad.cured(sight.stamp)), None)
            if same:  # an earlier snapshot with the mismatch that was reported already
                same.first = sight.stamp
                continue
            found_before.append(Bad(first=sight.stamp))
            votes = [replica_agreement.wrong(each.words) for each in found]
            blamed = {sight.ranks[place] for vote in votes for place in vote or ()}
            among = {sight.ranks[place] for each in found for place in each.words}
            before = [stamp.step for stamp, agreed in self._agreed.items() if agreed and stamp.step < sight.stamp.step]
            if not blamed:
                self._disputes[sight.stamp.step] = len(self.mismatches), found
            one = Mismatch(
                generation=Generation(generation),
                onset=Step(sight.stamp.step),
                agreed=Step(max(before, default=-1)),
                tensors=tuple(each.name for each in found[:TOLD]),
                count=len(found),
                ranks=tuple(map(Rank, sorted(among))),
                wrong=tuple(map(Rank, sorted(blamed))),
                at_s=wall_s,
            )
            self.mismatches = (*self.mismatches, one)
            news = True
        return news

    def _convict(self, sight: Sight, ledger: Ledger) -> None:
        """Resolve the open dispute (a mismatch whose wrong rank is not known) of this step. The ranks replayed the step, and now agree.
        Ranks that had another fingerprint before the replay were wrong."""
        if sight.stamp.step not in self._disputes:
            return
        number, held = self._disputes.pop(sight.stamp.step)
        blamed: set[int] = set()
        for each in held:
            right = ledger.value(each.name, tuple(each.words), sight.words)
            if right is not None:
                blamed |= {sight.ranks[place] for place in replica_agreement.convicted(each.words, right) or ()}
        known = replace(self.mismatches[number], wrong=tuple(map(Rank, sorted(blamed))), replayed=bool(blamed))
        self.mismatches = (*self.mismatches[:number], known, *self.mismatches[number + 1 :])

    # -- what follows from it ----------------------------------------------------------------------------------------------

    def fit(self, stamp: Stamp) -> bool:
        """Return whether training may resume from this snapshot, as far as is known. Training must not resume if a diverged state led to
        the snapshot."""
        return all(
            stamp.rewinds < bad.first.rewinds or stamp.step < bad.first.step or bad.cured(stamp)
            for bad in self._bad.get(stamp.generation, ())
        )

    def agreed(self, stamp: Stamp) -> bool:
        return self._agreed.get(stamp, False) and self.fit(stamp)

    def compared(self, stamp: Stamp) -> bool:
        return stamp in self._agreed

    def went_back(self, step: int, generation: int = 0, rewinds: int = 0) -> None:
        """Record that the ranks continue from `step`, so that later snapshots leave the lineage. generation, rewinds: the numbers that the
        next steps carry, if the rank processes stay the same."""
        self._line = {stamp for stamp in self._line if stamp.step <= step}
        self._left = [*self._left[-KEPT:], (step, (generation, rewinds))]
        self._held = {at: word for at, word in self._held.items() if at[-1] <= step}
        for bad in self._bad.get(generation, ()):
            if step < bad.first.step and bad.cure is None:
                bad.cure = rewinds

    def certified(self, held: Iterable[Stamp], finished: int) -> set[Stamp]:
        """Return the snapshots in `held` that are certified. finished: the last step that all ranks have finished."""
        ours = {stamp.step: stamp for stamp in held if stamp in self._line and self.fit(stamp)}
        now = stable(map(Step, ours), Step(finished), self._policy)
        self._certified |= {ours[step] for step in now}
        return self._certified.intersection(held)

    @property
    def held(self) -> str:
        """The digests of this node's snapshots, as text. The leader compares them with other nodes' digests."""
        return str(Held(model=self._model, words=self._held)) if self._held else ""

    @property
    def ledger(self) -> Ledger | None:
        ledgers = [future.result().ledger for _, future in self._layouts if future.done()]
        return max(ledgers, key=lambda each: each.compared, default=None)

    def copies(self) -> str:
        """Return a sentence for the log that says how many tensors are compared; empty while none are compared."""
        ledger = self.ledger
        if ledger is None or not ledger.compared:
            return ""
        few = min(len(ranks) for ranks in ledger.copies)
        which = " (with two copies, the agent cannot tell at once which one is wrong)" if few == 2 else ""
        return f"the agent compares {ledger.compared} tensors that data-parallel ranks hold alike{which}"


@dataclass(frozen=True)
class _Layout:
    ledger: Ledger
    parameters: list[replica_agreement.Numbers]
    digest: replica_agreement.Digest | None
    pieces: tuple[int, ...] = ()
    """Number of tensors in each rank's table."""

    @classmethod
    def read(cls, tables: tuple[bytes, ...]) -> _Layout:
        try:
            found = [Table.from_json(b'{"skeleton":null' + each) for each in tables]
        except SnapshotError:  # damaged in memory: a rank that restores it will report it
            found = []
        return cls.of(found, len(tables))

    @classmethod
    def of(cls, tables: Sequence[Table], ranks: int) -> _Layout:
        parameters = replica_agreement.parameters(tables) or [replica_agreement.NONE for _ in range(ranks)]
        digest = replica_agreement.digest(tables) if tables else None
        return cls(Ledger(tables), parameters, digest, tuple(len(table.pieces) for table in tables))

    def fits(self, sight: Sight) -> bool:
        """Return whether the snapshot has as many fingerprints as tensors. If not, the snapshot is damaged in memory."""
        return not self.pieces or self.pieces == tuple(map(len, sight.words))
