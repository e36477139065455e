"""The training processes of the simulated node: plain values that step, stage, judge and die.

What they compute is the tuple of the samples they have used, so that a lost or repeated sample shows in the final state; and beside it what
a generator has drawn at each step and a momentum that goes on from step to step, so that one that is forgotten shows too. They judge their
boundaries by the real rule, in the order of `training.boundary.boundary`, keep its course of the training, and write real board pages.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from mt_resilient.checkpoint.arena.slot_header import Stamp
from mt_resilient.resilience.inprocess import rewind_ladder
from mt_resilient.resilience.inprocess.loss_level import Outcome
from mt_resilient.resilience.inprocess.tally import Directive, Held, Judgement, Tally, blamed, judge, row, tally
from mt_resilient.resilience.ipc.board_events import Rewound, Sighted
from mt_resilient.resilience.ipc.handoff import Handoff
from mt_resilient.resilience.model import data_windows
from mt_resilient.resilience.model.generation import GenerationRecord, RewindOrder
from mt_resilient.resilience.model.rewind import Remedy, Turn
from mt_resilient.resilience.model.types import Doing, Order, OrderedBy, Rank, RankPhase, Step
from mt_resilient.resilience.text import sentences
from mt_resilient.training.boundary.lineage import Course

from .kept import HURT, Inner, Kept, Restored, State
from .processes import Processes, ns

if TYPE_CHECKING:
    from .cluster import Job
    from .node import Node

QUIET = 1.0
"""The loss of a step with which nothing is wrong, but for a ripple."""


class Ranks(Processes):
    """The training processes of one generation, in lock step: one boundary a tick."""

    def __init__(self, job: Job, record: GenerationRecord) -> None:
        super().__init__(job, record)
        self.state: State = ()
        """A sample that was used by replicas that were apart counts negative."""
        self.inner = Inner()
        self.bits = 0
        self.odd: frozenset[int] = frozenset()
        self.pending: tuple[float, ...] | None = None
        self.postponed: Judgement | None = None
        self.owed = False
        """A snapshot on disk is due, and none could be taken yet."""
        self.course = Course(
            Handoff(
                generation=record.number,
                board="",
                arena=(),
                snapshots="",
                resume_step=record.resume_step,
                replay_until=record.replay_until,
                origin="",
                every_steps=1,
                durable_every_steps=job.durable_every,
                reach_steps=100,
                policy=job.judged_by,
                turns=record.turns,
                windows=spec.windows if (spec := job.world().spec) else (),
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

    @property
    def step(self) -> int:
        return len(self.state)

    def advance(self, now_s: float) -> None:
        if self.feel(now_s):
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
                self._live(RankPhase.ATTACHED)
            case RankPhase.ATTACHED if not self.job.faults.unknown:
                self._build(now_s)
            case RankPhase.RESTORING:
                self._restore(now_s)
            case RankPhase.TRAINING:
                self._train(now_s)

    def end(self) -> None:
        self.job.say("the script is done")
        self._end(self.job.now_s)

    def hang(self, how: str) -> None:
        others = "rank 0 waits" if self.job.alone else "the others wait"
        self.job.say(f"rank 1 hangs {how}, and {others} for it")
        self.hung = True

    def _live(self, phase: RankPhase) -> None:
        self.life = phase
        for page in self.pages:
            page.phase = phase

    def _build(self, now_s: float) -> None:
        if self.job.faults.import_error:
            self.raise_(self.job.faults.import_error, now_s)
            return
        if len(self.record.members) in self.job.faults.refused:
            self.raise_("AssertionError: the batch cannot be dealt out evenly", now_s)
            return
        for page in self.pages:
            page.built_ns = ns(now_s)
        self._live(RankPhase.RESTORING)
        if self.job.faults.hangs_at_start:
            self.job.faults.hangs_at_start -= 1
            self.hang("while it starts")

    def _restore(self, now_s: float) -> None:
        step = self.record.resume_step
        if any(node.lending.fetching for node in self.nodes.values()):
            return
        if step >= 0:
            if not self._load(step, now_s, in_place=False, course=self.record.resume_course):
                return
            self.course.went_back(step)
        self._live(RankPhase.TRAINING)
        self.paused = bool(self.pages[0].paused)
        for page in self.pages:
            page.restored_ns = ns(now_s)
            page.tells = 1 if self.job.faults.fixed_data else 2
        if self.record.begins:
            self._take_course(self.record.begins, now_s)
        self.job.say(f"the ranks are in their loop at step {self.step}{', and wait' if self.paused else ''}")
        self._contribute(finite=True, missing=self.job.stage(self, durable=False))

    def kept(self) -> Kept:
        """What a snapshot takes along."""
        course = self.course.collect()
        return Kept(
            self.state,
            inner=self.inner,
            bits=self.bits,
            course={"figures": course["figures"].clone(), "level": course["level"], "windows": course["windows"]},
            stamp=Stamp(self.generation, self.rewinds, self.step),
            odd=self.odd,
        )

    def _load(self, step: int, now_s: float, *, in_place: bool, before: int = -1, course: tuple[int, ...] = ()) -> bool:
        """Go back to that step, from memory or else from disk; False where the ranks could not, and have raised. before: the state has
        to be older than this step; -1: any will do. course: that it has to be of; empty: any will do."""
        found = [kept for node in self.nodes.values() if (kept := self._found(node, step, now_s, course)) is not None]
        if len(found) < len(self.nodes):
            return False
        kept = found[0]
        self.state, self.inner, self.bits = kept.state, kept.inner, kept.bits
        self.odd = frozenset().union(*(each.odd for each in found))
        self.begun = step
        self.course.restore(kept.course)
        others = tuple(replace(each) for each in found[1:])
        self.job.restored.append(Restored(self.generation, step, before, replace(kept), in_place, others))
        return True

    def _found(self, node: Node, step: int, now_s: float, course: tuple[int, ...]) -> Kept | None:
        """What the ranks of this node restore of that step; None where they cannot, and all have raised."""
        if not self.alive:
            return None
        faults, kept, stored = self.job.faults, node.arena.get(step), node.stored(step, course)
        if kept is not None and (kept.seat != node.seat or course not in ((), kept.stamp[:2])):
            kept = None  # other ranks have left it there, or it is another one
        if kept is not None and step in faults.rot:
            faults.rot.discard(step)
            del node.arena[step]
            error = f"Unrestorable: cannot restore step {step}: its copy in memory is damaged"
            self.raise_(error, now_s, node, kind="snapshot", step=step, path="")
            return None
        if kept is None and step in faults.torn:
            error = f"Unrestorable: cannot restore step {step}: checksum of slab 0 does not match"
            self.raise_(error, now_s, node, kind="snapshot", step=step, path=f"snapshots/{step}")
            return None
        if kept is None and (faults.unreadable or stored is None):
            error = f"Unreadable: cannot read step {step} at present"
            self.raise_(error, now_s, node, kind="unreadable", step=step, path=f"snapshots/{step}")
            return None
        return kept or stored

    def _train(self, now_s: float) -> None:
        """One step, then what `Session.boundary` does; nothing where the state is that of the last step, or the ranks wait."""
        if self.paused and self._waits(now_s):
            return
        if self.step == self.job.total:
            self._leave(RankPhase.FINISHED, "the ranks find nothing left to do", now_s)
            return
        sample = self.course.batch(self.step) + 1
        if self.job.faults.spike_at.get(self.step + 1):
            self.job.faults.spike_at[self.step + 1] -= 1
            sample += HURT
        self.state, self.inner = (*self.state, -sample if self.odd else sample), self.inner.stepped(sample)
        self.bits = hash((self.bits, self.generation, self.rewinds, self.step))
        if self.job.faults.flip_at.get(self.step):
            self.job.faults.flip_at[self.step] -= 1
            self.odd = frozenset([1])
            self.job.say(f"a bit of rank 1's copy flips after step {self.step}")
        first = self.pages[0].step < 0
        for page in self.pages:
            page.beat(self.step, 1.0, 1.0, ns(now_s))
            if first:
                page.first_step, page.stepped_ns = page.step, ns(now_s)
            if self.step == self.record.replay_until:
                page.replayed_ns = ns(now_s)
        self.job.stepped.append(self.step)
        self.job.computed += 1
        self.job.stepped_in.append(self.generation)
        finite = sample not in self.job.faults.nan_batches
        if self.job.faults.nan_at.get(self.step):
            self.job.faults.nan_at[self.step] -= 1
            finite = False
        if not finite:
            self.job.say(f"step {self.step} gives NaN")
        last = self.step == self.job.total
        before = self._judged(now_s) or self.postponed
        self.postponed = None
        if not self.alive:
            return
        if before and before.directive is Directive.REWIND:
            self._rewind(before, now_s)
            return
        leave = before is not None and before.directive is Directive.LEAVE
        wanted = last or bool(leave and before and before.snapshot)
        self.owed |= self.step % self.job.durable_every == 0
        missing = everybody = frozenset(range(len(self.pages)))
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
        elif self.job.faults.kill_at.get(self.step):
            self.job.faults.kill_at[self.step] -= 1
            self.kill(1, now_s)
        elif self.job.faults.hang_at.get(self.step):
            self.job.faults.hang_at[self.step] -= 1
            self.hang(f"after step {self.step}")
        elif self.job.faults.busy_at.get(self.step):
            self.busy_s = self.job.faults.busy_at.pop(self.step)
            self.job.say(f"rank 1 computes for {self.busy_s} s after step {self.step}, and rank 0 waits for it")

    def _stage(self, durable: bool, patient: bool = False) -> frozenset[int]:
        """Take a snapshot; the ranks that have missed it."""
        if self.pages[0].durable > self.asked:
            durable, self.asked = True, self.pages[0].durable
            for page in self.pages:
                page.durable_step = self.step if page.durable_step < 0 else page.durable_step
        return self.job.stage(self, durable=durable, patient=patient)

    def _waits(self, now_s: float) -> bool:
        """One look of ranks that are paused; whether they still wait."""
        if self.pending is None:
            asked = self.pages[0].durable > self.asked
            self._contribute(finite=True, missing=self._stage(False) if asked else frozenset())
        judged = self._judged(now_s)
        assert judged
        if judged.directive is Directive.REWIND:
            self._rewind(judged, now_s)
        elif judged.directive is Directive.LEAVE:
            missing = self.job.stage(self, durable=judged.snapshot, patient=judged.snapshot)
            self._contribute(finite=True, missing=missing)
            self._judged(now_s)
            self._leave(RankPhase.STOPPED, "the ranks leave their loop as ordered", now_s)
        elif not self.paused:
            self.job.say("the ranks go on")
        for page in self.pages:
            page.doing, page.beat_ns = Doing.PAUSED if self.paused else Doing.STEP, ns(now_s)
        return self.paused or judged.directive is not Directive.GO_ON

    def _take_course(self, order: RewindOrder, now_s: float) -> None:
        """The state that `order` names is restored: what `consensus.obey` does."""
        window = data_windows.following(order.to, order.skip, self.course.windows) if order.skip else None
        replay = Remedy.REWIND if self.job.faults.fixed_data else Remedy.REPLAY
        remedy = Remedy.SKIP if window else replay
        turn = Turn(kind=order.cause, onset=Step(order.to + 1), to=order.to, remedy=remedy, window=window)
        self.course.turned(turn)
        self.rewinds += 1
        self.obeyed = order.number
        done = Rewound(
            kind=order.cause,
            onset=order.to + 1,
            reached=max(self.pages[0].step, order.to),
            to=order.to,
            remedy=remedy,
            window=window,
            value=0.0,
            expected=0.0,
            at_ns=ns(now_s),
            done_ns=ns(now_s + 0.005),
            order=order.number,
        )
        for page in self.pages:
            page.rewound(done)
        left_out = f" and leave out the samples {window.start + 1} to {window.stop}" if window else ""
        self.job.say(f"the ranks take their course from step {order.to}, as ordered{left_out}")

    def _go_back(self, to: int, now_s: float, before: int = -1) -> bool:
        """In place; False where the ranks could not, and have raised. before: as for `_load`."""
        if not self._load(to, now_s, in_place=True, before=before):
            return False
        self.owed = False
        for node in self.nodes.values():
            for step in [step for step in node.arena if step > to]:
                del node.arena[step]
        return True

    def _leave(self, phase: RankPhase, sentence: str, now_s: float) -> None:
        self._live(phase)
        self.job.say(sentence)
        if self.job.faults.hangs_in_teardown:
            self.hang("in its teardown")
            return
        self.leaving_s = self.job.faults.teardown_s
        if not self.leaving_s:
            self._end(now_s)

    def _end(self, now_s: float) -> None:
        for process in (p for group in self.worker_groups for p in (*group.ranks.values(), group.launcher)):
            process.ended_s, process.code = now_s + self.job.skew_s, 0

    def _contribute(self, finite: bool, missing: frozenset[int]) -> None:
        rows = [
            row(
                Tally(
                    step=Step(self.step),
                    non_finite=not finite,
                    newest=Held.MISSED if rank in missing else Held.WHOLE,
                    order=Order(page.order),
                    loss=self._loss() if finite and self.state else None,
                    fixed_data=self.job.faults.fixed_data,
                    rewind=page.ordered if page.ordered > self.obeyed else 0,
                    pause=bool(page.paused),
                )
            )
            for rank, page in enumerate(self.pages)
        ]
        self.pending = tuple(map(max, *rows))

    def _judged(self, now_s: float) -> Judgement | None:
        """The judgement of the tally that is due, if one is; ranks that give up are not alive afterwards."""
        if self.pending is None:
            return None
        said, self.pending = tally(self.pending), None
        watched = self.course.level.watch
        judgement = judge(said, self.course.figures, self.course.level, self.course.turns, self.job.judged_by)
        assert judgement.directive is not Directive.DIVERGED
        if judgement.waits and self.job.faults.odd:
            judgement = blamed(judgement, said, self.course.turns, self.job.judged_by.ladder)
        self.paused = judgement.pause
        for node in self.nodes.values():
            if judgement.newest is Held.WHOLE and said.step in node.arena:
                node.arena[said.step].sealed = True
            elif judgement.newest is Held.MISSED and said.step in node.arena:
                self.owed |= node.arena.pop(said.step).durable
        if judgement.directive in (Directive.GO_ON, Directive.LEAVE):
            self.course.judged(said.figure, judgement.level)
            if watched and not judgement.level.watch:
                self._watch_ended(judgement.level.outcome, said.step)
            if judgement.finding:
                self._sighted(judgement, now_s)
        if judgement.directive is Directive.GIVE_UP:
            assert judgement.finding
            past = rewind_ladder.same_fault(judgement.finding, self.course.turns, self.job.judged_by.ladder)
            words = {"kind": judgement.finding.kind.value, "step": judgement.finding.onset}
            done = sentences.remedies([turn.remedy for turn in past])
            self.raise_(f"Incurable: {sentences.finding(judgement.finding)} again, after {done}", now_s, **words)
        if judgement.rewind:
            if self._ordered_to() >= 0:
                return judgement._replace(directive=Directive.REWIND)
            self.obeyed = judgement.rewind
            for page in self.pages:
                page.declined = judgement.rewind
        return judgement

    def _watch_ended(self, outcome: Outcome, step: int) -> None:
        for page in self.pages:
            for ordinal, told in page.open_sightings().items():
                if told.remedy is Remedy.WAIT:
                    page.sighted_again(ordinal, step, outcome)

    def _sighted(self, judgement: Judgement, now_s: float) -> None:
        """What `Session` notes where ranks only observe."""
        finding, answer = judgement.finding, judgement.answer
        assert finding
        assert answer
        for page in self.pages:
            again = [
                ordinal
                for ordinal, told in page.open_sightings().items()
                if rewind_ladder.goes_on(told.kind, told.last, finding, self.job.judged_by.ladder)
            ]
            if again:
                page.sighted_again(again[-1], finding.seen)
                continue
            page.sighted(
                Sighted(
                    kind=finding.kind,
                    onset=finding.onset,
                    seen=finding.seen,
                    last=finding.seen,
                    to=max((s for s in self._held()[1] if s < finding.onset), default=-1),
                    remedy=answer.remedy,
                    window=None,
                    value=finding.value,
                    expected=finding.expected,
                    at_ns=ns(now_s),
                )
            )

    def _held(self) -> tuple[set[int], set[int]]:
        """Steps of which all nodes would restore the same state: those that all have in memory; and all of them."""
        nodes = [*self.nodes.values()]
        memory = [{s: k for s, k in n.arena.items() if k.sealed and k.seat == n.seat} for n in nodes]
        disk = [{s: k for s in self.job.listed(n.name) if (k := n.stored(s))} for n in nodes]
        each = [{**stored, **kept} for stored, kept in zip(disk, memory, strict=True)]
        alike = {s for s in set.intersection(*map(set, each)) if len({(e[s].state, e[s].bits) for e in each}) == 1}
        return alike.intersection(*memory), alike

    def _ordered_to(self) -> int:
        """Where the ranks go back to as ordered; -1: they cannot."""
        page = self.pages[0]
        _, held = self._held()
        if page.ordered_by == tuple(OrderedBy).index(OrderedBy.COMPARISON):
            return max((step for step in held if step <= page.ordered_to), default=-1)
        return page.ordered_to if page.ordered_to in held else -1

    def _loss(self) -> float:
        high = any(sample > HURT or sample in self.job.faults.spike_batches for sample in self.state)
        return QUIET + 0.01 * (self.step % 5) + (4.0 if high or self.step in self.job.faults.hard_steps else 0.0)

    def _rewind(self, judged: Judgement, now_s: float) -> None:
        if judged.rewind:
            page = self.pages[0]
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
        held = self._held()

        def newest(at_most: int) -> int:
            tiers = (max((step for step in tier if step <= at_most), default=-1) for tier in held)
            return next((step for step in tiers if step >= 0), -1)

        answer, to = rewind_ladder.goes_to(answer, finding, newest, lambda: min(held[1], default=math.inf))
        if to < 0:
            self.raise_(
                "InternalError: no snapshot is left to go back to in place; the worker group restarts from disk", now_s
            )
            return
        past = rewind_ladder.same_fault(finding, self.course.turns, self.job.judged_by.ladder)
        window = answer.window(finding.onset, Step(to), self.course.windows)
        remedy = rewind_ladder.done(answer, past, Step(to))
        watched = self.course.level.watch
        if not self._go_back(to, now_s, before=finding.onset):
            return
        if watched:
            self._watch_ended(Outcome.ACTED, self.pages[0].step)
        self.course.turned(Turn(kind=finding.kind, onset=finding.onset, to=Step(to), remedy=remedy, window=window))
        self.course.went_back(to)
        self.rewinds += 1
        done = Rewound(
            kind=finding.kind,
            onset=finding.onset,
            reached=self.pages[0].step,
            to=to,
            remedy=remedy,
            window=window,
            value=finding.value,
            expected=finding.expected,
            ranks=(Rank(1),) if self.job.faults.odd else (),
            at_ns=ns(now_s),
            done_ns=ns(now_s + 0.005),
        )
        for page in self.pages:
            page.rewound(done)
        left_out = f" and leave out the samples {window.start + 1} to {window.stop}" if window else ""
        self.job.say(f"the ranks go back to step {to} in place{left_out}")
