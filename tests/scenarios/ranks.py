"""The training processes of the simulated node: plain values that step, stage, judge and die.

What they compute is the tuple of the samples they have used, so that a lost or repeated sample shows in the final state; and beside it what
a generator has drawn at each step and a momentum that goes on from step to step, so that one that is forgotten shows too. They judge their
boundaries by the real rule, in the order of `training.session`, keep its course of the training, and write real board pages.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mt_resilient.agent.gang import Gang, Watched
from mt_resilient.checkpoint.header import Stamp
from mt_resilient.resilience import describe, ladder, windows
from mt_resilient.resilience.board import Rewound, Sighted
from mt_resilient.resilience.boundary import Directive, Held, Judgement, Tally, judge, row, tally
from mt_resilient.resilience.handoff import Handoff
from mt_resilient.resilience.ladder import Remedy, Turn
from mt_resilient.resilience.orders import GenerationRecord, RewindOrder
from mt_resilient.resilience.signals import Doing, Order, OrderedBy, RankPhase, Step
from mt_resilient.training.course import Course

from .kept import HURT, Inner, Kept, Restored, State

if TYPE_CHECKING:
    from .node import Node

QUIET = 1.0
"""The loss of a step with which nothing is wrong, but for a ripple."""


class Ranks:
    """The training processes of one generation, in lock step: one boundary a tick."""

    def __init__(self, node: Node, record: GenerationRecord, now_s: float) -> None:
        self.node, self.record = node, record
        self.gang = Gang(record.number, Watched(4000, -1), "cold: the warm process has not been started yet")
        self.life = RankPhase.ABSENT
        self.state: State = ()
        """A sample that was used by replicas that were apart counts negative."""
        self.inner = Inner()
        self.odd: frozenset[int] = frozenset()
        self.pending: tuple[float, ...] | None = None
        self.postponed: Judgement | None = None
        self.owed = False
        """A snapshot on disk is due, and none could be taken yet."""
        self.course = Course(
            Handoff(
                agent_pid=4,
                generation=record.number,
                board="",
                arena=(),
                snapshots="",
                resume_step=record.resume_step,
                replay_until=record.replay_until,
                origin="",
                every_steps=1,
                durable_every_steps=node.durable_every,
                reach_steps=100,
                policy=node.judged_by,
                turns=record.turns,
                windows=(),
                modules="",
            )
        )
        self.begun = max(0, record.resume_step)
        """The step that they began with, or went back to last."""
        self.rewinds = 0
        self.obeyed = record.begins.number if record.begins else 0
        self.asked = 0
        """Snapshots that were asked for, and taken."""
        self.paused = False
        self.hung = False
        """Rank 1 hangs, and rank 0 waits for it;"""
        self.busy_s = 0
        """or it computes for so long yet."""
        self.leaving_s = 0
        for page in node.pages:
            page.clear(record.number)
            page.paused = int(record.paused)

    @property
    def step(self) -> int:
        return len(self.state)

    @property
    def alive(self) -> bool:
        return not self.gang.launcher.ended_s and not any(p.ended_s for p in self.gang.ranks.values())

    def advance(self, now_s: float) -> None:
        if not self.alive:
            if not self.gang.launcher.ended_s:
                self.gang.launcher.ended_s, self.gang.launcher.code = now_s + self.node.job.skew_s, 1
                self.node.say("torchrun sees it and ends with code 1")
            return
        if self.hung or self.busy_s:
            self.busy_s = max(0, self.busy_s - 1)
            return
        if self.leaving_s:
            self.leaving_s -= 1
            if not self.leaving_s:
                self._end(now_s)
            return
        match self.life:
            case RankPhase.ABSENT:
                for local_rank, page in enumerate(self.node.pages):
                    page.pid, page.rank, page.attached_ns = 5000 + local_rank, local_rank, _ns(now_s)
                    self.gang.ranks[local_rank] = Watched(page.pid, -1)
                self._live(RankPhase.ATTACHED)
                self.node.say("both ranks are attached" if len(self.node.pages) == 2 else "all ranks are attached")
            case RankPhase.ATTACHED:
                self._build(now_s)
            case RankPhase.RESTORING:
                self._restore(now_s)
            case RankPhase.TRAINING:
                self._train(now_s)

    def hang(self, how: str) -> None:
        self.node.say(f"rank 1 hangs {how}, and rank 0 waits for it")
        self.hung = True

    def kill(self, rank: int, now_s: float) -> None:
        """SIGKILL for one of them; its peer finds the connection closed."""
        started = self.node.pages[rank].step >= 0
        self.node.say(f"rank {rank} is killed {f'after step {self.step}' if started else 'before its first step'}")
        gone, wall_s = self.gang.ranks[rank], now_s + self.node.job.skew_s
        gone.ended_s, gone.code = wall_s, -9
        for peer in self.gang.ranks.keys() - {rank}:
            if not self.gang.ranks[peer].ended_s:
                self.node.pages[peer].say_farewell(error="RuntimeError: Connection closed by peer", traceback="")
                self.gang.ranks[peer].ended_s, self.gang.ranks[peer].code = wall_s + 0.01, 1

    def kill_all(self, now_s: float) -> None:
        """SIGKILL for the launcher; its ranks die with it."""
        self.node.say("torchrun is killed, and its ranks with it")
        for process in (self.gang.launcher, *self.gang.ranks.values()):
            if not process.ended_s:
                process.ended_s, process.code = now_s + self.node.job.skew_s, -9

    def raise_(self, error: str, now_s: float, **words: Any) -> None:
        """An exception on all of them."""
        self.node.say(f"the ranks raise {error}")
        for rank, process in self.gang.ranks.items():
            self.node.pages[rank].say_farewell(error=error, traceback=f"Traceback\n{error}", **words)
            process.ended_s, process.code = now_s + self.node.job.skew_s + 0.01 * rank, 1

    def _live(self, phase: RankPhase) -> None:
        self.life = phase
        for page in self.node.pages:
            page.phase = phase

    def _build(self, now_s: float) -> None:
        if self.node.faults.import_error:
            self.raise_(self.node.faults.import_error, now_s)
            return
        for page in self.node.pages:
            page.built_ns = _ns(now_s)
        self._live(RankPhase.RESTORING)
        if self.node.faults.hangs_at_start:
            self.node.faults.hangs_at_start -= 1
            self.hang("while it starts")

    def _restore(self, now_s: float) -> None:
        step = self.record.resume_step
        if step >= 0:
            if not self._load(step, now_s, in_place=False):
                return
            self.course.went_back(step)
        self._live(RankPhase.TRAINING)
        self.paused = bool(self.node.pages[0].paused)
        for page in self.node.pages:
            page.restored_ns = _ns(now_s)
            page.tells = 1 if self.node.faults.fixed_data else 2
        if self.record.begins:
            self._take_course(self.record.begins, now_s)
        self.node.say(f"the ranks are in their loop at step {self.step}{', and wait' if self.paused else ''}")
        self._contribute(finite=True, missing=self.node.stage(self, durable=False))

    def kept(self) -> Kept:
        """What a snapshot takes along."""
        course = self.course.collect()
        return Kept(
            self.state,
            inner=self.inner,
            course={"figures": course["figures"].clone(), "windows": course["windows"]},
            stamp=Stamp(self.gang.generation, self.rewinds, self.step),
            odd=self.odd,
        )

    def _load(self, step: int, now_s: float, *, in_place: bool, before: int = -1) -> bool:
        """Go back to that step, from memory or else from disk; False where the ranks could not, and have raised. before: the state has
        to be older than this step; -1: any will do."""
        faults, kept = self.node.faults, self.node.arena.get(step)
        if kept is not None and step in faults.rot:
            faults.rot.discard(step)
            del self.node.arena[step]
            error = f"Unrestorable: cannot restore step {step}: its copy in memory is damaged"
            self.raise_(error, now_s, kind="snapshot", step=step, path="")
            return False
        if kept is None and step in faults.torn:
            error = f"Unrestorable: cannot restore step {step}: checksum of slab 0 does not match"
            self.raise_(error, now_s, kind="snapshot", step=step, path=f"snapshots/{step}")
            return False
        if kept is None and (faults.unreadable or step not in self.node.disk):
            error = f"Unreadable: cannot read step {step} at present"
            self.raise_(error, now_s, kind="unreadable", step=step, path=f"snapshots/{step}")
            return False
        kept = kept or self.node.job.written[step]
        self.state, self.inner, self.odd = kept.state, kept.inner, kept.odd
        self.begun = step
        self.course.restore(kept.course)
        self.node.job.restored.append(Restored(self.gang.generation, step, before, replace(kept), in_place))
        return True

    def _train(self, now_s: float) -> None:
        """One step, then what `Session.boundary` does; nothing where the state is that of the last step, or the ranks wait."""
        if self.paused and self._waits(now_s):
            return
        if self.step == self.node.total:
            self._leave(RankPhase.FINISHED, "the ranks find nothing left to do", now_s)
            return
        sample = self.course.batch(self.step) + 1
        if self.node.faults.spike_at.get(self.step + 1):
            self.node.faults.spike_at[self.step + 1] -= 1
            sample += HURT
        self.state, self.inner = (*self.state, -sample if self.odd else sample), self.inner.stepped(sample)
        if self.node.faults.flip_at.get(self.step):
            self.node.faults.flip_at[self.step] -= 1
            self.odd = frozenset([1])
            self.node.say(f"a bit of rank 1's copy flips after step {self.step}")
        first = self.node.pages[0].step < 0
        for page in self.node.pages:
            page.beat(self.step, 1.0, 1.0, _ns(now_s))
            if first:
                page.stepped_ns = _ns(now_s)
            if self.step == self.record.replay_until:
                page.replayed_ns = _ns(now_s)
        self.node.stepped.append(self.step)
        self.node.job.computed += 1
        finite = sample not in self.node.faults.nan_batches
        if self.node.faults.nan_at.get(self.step):
            self.node.faults.nan_at[self.step] -= 1
            finite = False
        if not finite:
            self.node.say(f"step {self.step} gives NaN")
        last = self.step == self.node.total
        before = self._judged(now_s) or self.postponed
        self.postponed = None
        if not self.alive:
            return
        if before and before.directive is Directive.REWIND:
            self._rewind(before, now_s)
            return
        leave = before is not None and before.directive is Directive.LEAVE
        wanted = last or bool(leave and before and before.snapshot)
        self.owed |= self.step % self.node.durable_every == 0
        missing = everybody = frozenset(range(len(self.node.pages)))
        if finite:
            missing = self._stage(wanted or self.owed, patient=wanted)
        self.owed = False
        self._contribute(finite=finite, missing=missing if finite else everybody)
        judged = self._judged(now_s) if last or leave else None
        if judged and judged.directive is Directive.REWIND:
            self.postponed = before if leave else None
            self._rewind(judged, now_s)
            return
        if leave:
            self._leave(RankPhase.STOPPED, "the ranks leave their loop as ordered", now_s)
        elif last and self.alive:
            self._leave(RankPhase.FINISHED, "the ranks have done their last step", now_s)
        elif self.node.faults.kill_at.get(self.step):
            self.node.faults.kill_at[self.step] -= 1
            self.kill(1, now_s)
        elif self.node.faults.hang_at.get(self.step):
            self.node.faults.hang_at[self.step] -= 1
            self.hang(f"after step {self.step}")
        elif self.node.faults.busy_at.get(self.step):
            self.busy_s = self.node.faults.busy_at.pop(self.step)
            self.node.say(f"rank 1 computes for {self.busy_s} s after step {self.step}, and rank 0 waits for it")

    def _stage(self, durable: bool, patient: bool = False) -> frozenset[int]:
        """Take a snapshot; the ranks that have missed it."""
        if self.node.pages[0].durable > self.asked:
            durable, self.asked = True, self.node.pages[0].durable
            for page in self.node.pages:
                page.durable_step = self.step if page.durable_step < 0 else page.durable_step
        return self.node.stage(self, durable=durable, patient=patient)

    def _waits(self, now_s: float) -> bool:
        """One look of ranks that are paused; whether they still wait."""
        if self.pending is None:
            asked = self.node.pages[0].durable > self.asked
            self._contribute(finite=True, missing=self._stage(False) if asked else frozenset())
        judged = self._judged(now_s)
        assert judged
        if judged.directive is Directive.REWIND:
            self._rewind(judged, now_s)
        elif judged.directive is Directive.LEAVE:
            missing = self.node.stage(self, durable=judged.snapshot, patient=judged.snapshot)
            self._contribute(finite=True, missing=missing)
            self._judged(now_s)
            self._leave(RankPhase.STOPPED, "the ranks leave their loop as ordered", now_s)
        elif not self.paused:
            self.node.say("the ranks go on")
        for page in self.node.pages:
            page.doing, page.beat_ns = Doing.PAUSED if self.paused else Doing.STEP, _ns(now_s)
        return self.paused or judged.directive is not Directive.GO_ON

    def _take_course(self, order: RewindOrder, now_s: float) -> None:
        """The state that `order` names is restored: what `council.obey` does."""
        window = windows.following(order.to, order.skip, self.course.windows) if order.skip else None
        remedy = Remedy.SKIP if window else Remedy.REPLAY
        turn = Turn(kind=order.cause, onset=Step(order.to + 1), to=order.to, remedy=remedy, window=window)
        self.course.turned(turn)
        self.rewinds += 1
        self.obeyed = order.number
        done = Rewound(
            kind=order.cause,
            onset=order.to + 1,
            reached=max(self.node.pages[0].step, order.to),
            to=order.to,
            remedy=remedy,
            window=window,
            value=0.0,
            expected=0.0,
            at_ns=_ns(now_s),
            done_ns=_ns(now_s + 0.005),
            order=order.number,
        )
        for page in self.node.pages:
            page.rewound(done)
        left_out = f" and leave out the samples {window.start + 1} to {window.stop}" if window else ""
        self.node.say(f"the ranks take their course from step {order.to}, as ordered{left_out}")

    def _go_back(self, to: int, now_s: float, before: int = -1) -> bool:
        """In place; False where the ranks could not, and have raised. before: as for `_load`."""
        if not self._load(to, now_s, in_place=True, before=before):
            return False
        self.owed = False
        for step in [step for step in self.node.arena if step > to]:
            del self.node.arena[step]
        return True

    def _leave(self, phase: RankPhase, sentence: str, now_s: float) -> None:
        self._live(phase)
        self.node.say(sentence)
        if self.node.faults.hangs_in_teardown:
            self.hang("in its teardown")
            return
        self.leaving_s = self.node.faults.teardown_s
        if not self.leaving_s:
            self._end(now_s)

    def _end(self, now_s: float) -> None:
        for process in (*self.gang.ranks.values(), self.gang.launcher):
            process.ended_s, process.code = now_s + self.node.job.skew_s, 0

    def _contribute(self, finite: bool, missing: frozenset[int]) -> None:
        rows = [
            row(
                Tally(
                    step=Step(self.step),
                    non_finite=not finite,
                    newest=Held.MISSED if rank in missing else Held.WHOLE,
                    order=Order(page.order),
                    loss=self._loss() if finite and self.state else None,
                    fixed_data=self.node.faults.fixed_data,
                    rewind=page.ordered if page.ordered > self.obeyed else 0,
                    pause=bool(page.paused),
                )
            )
            for rank, page in enumerate(self.node.pages)
        ]
        self.pending = tuple(map(max, *rows))

    def _judged(self, now_s: float) -> Judgement | None:
        """The judgement of the tally that is due, if one is; ranks that give up are not alive afterwards."""
        if self.pending is None:
            return None
        said, self.pending = tally(self.pending), None
        judgement = judge(said, self.course.figures, self.course.turns, self.node.judged_by)
        assert judgement.directive is not Directive.DIVERGED
        self.paused = judgement.pause
        if judgement.newest is Held.WHOLE and said.step in self.node.arena:
            self.node.arena[said.step].sealed = True
        elif judgement.newest is Held.MISSED and said.step in self.node.arena:
            self.owed |= self.node.arena.pop(said.step).durable
        if judgement.directive in (Directive.GO_ON, Directive.LEAVE):
            self.course.judged(said.figure)
            if judgement.finding:
                self._sighted(judgement, now_s)
        if judgement.directive is Directive.GIVE_UP:
            assert judgement.finding
            past = ladder.same_fault(judgement.finding, self.course.turns, self.node.judged_by.ladder)
            words = {"kind": judgement.finding.kind.value, "step": judgement.finding.onset}
            done = describe.remedies([turn.remedy for turn in past])
            self.raise_(f"Incurable: {describe.finding(judgement.finding)} again, after {done}", now_s, **words)
        if judgement.rewind:
            if self._ordered_to() >= 0:
                return judgement._replace(directive=Directive.REWIND)
            self.obeyed = judgement.rewind
            for page in self.node.pages:
                page.declined = judgement.rewind
        return judgement

    def _sighted(self, judgement: Judgement, now_s: float) -> None:
        """What `Session` notes where ranks only observe."""
        finding, answer = judgement.finding, judgement.answer
        assert finding
        assert answer
        for page in self.node.pages:
            before = page.sighting(page.sightings) if page.sightings else None
            if before and ladder.goes_on(before.kind, before.last, finding, self.node.judged_by.ladder):
                page.sighted_again(finding.seen)
                continue
            page.sighted(
                Sighted(
                    kind=finding.kind,
                    onset=finding.onset,
                    seen=finding.seen,
                    last=finding.seen,
                    to=max((step for step, kept in self.node.arena.items() if kept.sealed), default=-1),
                    remedy=answer.remedy,
                    window=None,
                    value=finding.value,
                    expected=finding.expected,
                    at_ns=_ns(now_s),
                )
            )

    def _ordered_to(self) -> int:
        """Where the ranks go back to as ordered; -1: they cannot."""
        page = self.node.pages[0]
        held = {*self.node.disk, *(step for step, kept in self.node.arena.items() if kept.sealed)}
        if page.ordered_by == tuple(OrderedBy).index(OrderedBy.COMPARISON):
            return max((step for step in held if step <= page.ordered_to), default=-1)
        return page.ordered_to if page.ordered_to in held else -1

    def _loss(self) -> float:
        high = any(sample > HURT or sample in self.node.faults.spike_batches for sample in self.state)
        return QUIET + 0.01 * (self.step % 5) + (4.0 if high else 0.0)

    def _rewind(self, judged: Judgement, now_s: float) -> None:
        if judged.rewind:
            page = self.node.pages[0]
            to = self._ordered_to()
            if not self._go_back(to, now_s):
                return
            self.course.went_back(to)
            order = RewindOrder(
                number=page.ordered,
                to=Step(to),
                skip=page.ordered_skip,
                cause=tuple(OrderedBy)[page.ordered_by],
            )
            self._take_course(order, now_s)
            return
        finding, answer = judged.finding, judged.answer
        assert finding
        assert answer
        sealed = [step for step, kept in self.node.arena.items() if kept.sealed]
        to = -1
        for at_most in (answer.at_most, finding.onset - 1):
            for tier in (sealed, self.node.disk):
                to = to if to >= 0 else max((step for step in tier if step <= at_most), default=-1)
        if to < 0:
            self.raise_("InternalError: no snapshot is left to go back to in place; the gang restarts from disk", now_s)
            return
        past = ladder.same_fault(finding, self.course.turns, self.node.judged_by.ladder)
        window = answer.window(finding.onset, Step(to), self.course.windows)
        remedy = ladder.done(answer, past, Step(to))
        if not self._go_back(to, now_s, before=finding.onset):
            return
        self.course.turned(Turn(kind=finding.kind, onset=finding.onset, to=Step(to), remedy=remedy, window=window))
        self.course.went_back(to)
        self.rewinds += 1
        done = Rewound(
            kind=finding.kind,
            onset=finding.onset,
            reached=self.node.pages[0].step,
            to=to,
            remedy=remedy,
            window=window,
            value=finding.value,
            expected=finding.expected,
            at_ns=_ns(now_s),
            done_ns=_ns(now_s + 0.005),
        )
        for page in self.node.pages:
            page.rewound(done)
        left_out = f" and leave out the samples {window.start + 1} to {window.stop}" if window else ""
        self.node.say(f"the ranks go back to step {to} in place{left_out}")


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
