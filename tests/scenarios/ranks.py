"""The training processes of the simulated node: plain values that step, stage, judge and die.

What they compute is the tuple of the samples they have used, so that a lost or repeated sample shows in the final state. They judge
their boundaries by the real rule, in the order of `training.session`, and write real board pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mt_resilient.agent.gang import Gang, Watched
from mt_resilient.checkpoint.header import Stamp
from mt_resilient.resilience import describe, ladder, windows
from mt_resilient.resilience.board import Rewound
from mt_resilient.resilience.boundary import Directive, Held, Judgement, Tally, judge, row, tally
from mt_resilient.resilience.ladder import Remedy, Turn
from mt_resilient.resilience.orders import GenerationRecord, RewindOrder
from mt_resilient.resilience.signals import Doing, Order, OrderedBy, RankPhase, Step
from mt_resilient.resilience.spikes import Figure

if TYPE_CHECKING:
    from .node import Node

State = tuple[int, ...]
HURT = 1_000_000
"""Added to a sample by whose use the state was damaged."""
QUIET = 1.0
"""The loss of a step with which nothing is wrong, but for a ripple."""


@dataclass
class Kept:
    """A snapshot in memory, the same for all ranks."""

    state: State
    sealed: bool = False
    durable: bool = False
    drained_at_s: float = 0.0
    stamp: Stamp = Stamp(0, 0, 0)
    odd: frozenset[int] = frozenset()
    """Ranks whose copy is another one."""


@dataclass
class Faults:
    """What is wrong with the world; episodes set it."""

    import_error: str = ""
    nan_at: dict[int, int] = field(default_factory=dict)
    """Step → how many times it will give NaN."""
    nan_batches: set[int] = field(default_factory=set)
    """Samples that give NaN whenever they are used,"""
    spike_batches: set[int] = field(default_factory=set)
    """and those that let the loss go up: it stays there while the state has used one."""
    spike_at: dict[int, int] = field(default_factory=dict)
    """Step → how many times the state will be damaged there, so that the loss goes up."""
    fixed_data: bool = False
    """The script has no way to leave data out."""
    kill_at: dict[int, int] = field(default_factory=dict)
    """Step → how many times rank 1 will be killed right after it."""
    flip_at: dict[int, int] = field(default_factory=dict)
    """Step → how many times a bit of rank 1's copy will flip right after it. What is computed from it then is wrong on all ranks."""
    torn: set[int] = field(default_factory=set)
    """Steps whose snapshot on disk cannot be read."""
    hang_at: dict[int, int] = field(default_factory=dict)
    """Step → how many times rank 1 will hang right after it."""
    busy_at: dict[int, int] = field(default_factory=dict)
    """Step → how many seconds rank 1 will compute after it."""
    hangs_at_start: int = 0
    """How many lives of the ranks begin with a hang of rank 1, before its first step."""
    hangs_in_teardown: bool = False
    agent_stalls: bool = False


class Ranks:
    """The training processes of one generation, in lock step: one boundary a tick."""

    def __init__(self, node: Node, record: GenerationRecord, now_s: float) -> None:
        self.node, self.record = node, record
        self.gang = Gang(record.number, Watched(4000, -1), "cold: the warm process has not been started yet")
        self.life = RankPhase.ABSENT
        self.state: State = ()
        """A sample that was used by replicas that were apart counts negative."""
        self.odd: frozenset[int] = frozenset()
        self.pending: tuple[float, ...] | None = None
        self.turns = list(record.turns)
        self.windows = windows.merged(turn.window for turn in record.turns if turn.window)
        self.figures: list[Figure] = []
        self.rewinds = 0
        self.obeyed = record.begins.number if record.begins else 0
        self.asked = 0
        """Snapshots that were asked for, and taken."""
        self.paused = False
        self.hung = False
        """Rank 1 hangs, and rank 0 waits for it;"""
        self.busy_s = 0
        """or it computes for so long yet."""
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
                self.gang.launcher.ended_s, self.gang.launcher.code = now_s, 1
                self.node.say("torchrun sees it and ends with code 1")
            return
        if self.hung or self.busy_s:
            self.busy_s = max(0, self.busy_s - 1)
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
        gone = self.gang.ranks[rank]
        gone.ended_s, gone.code = now_s, -9
        for peer in self.gang.ranks.keys() - {rank}:
            self.node.pages[peer].say_farewell(error="RuntimeError: Connection closed by peer", traceback="")
            self.gang.ranks[peer].ended_s, self.gang.ranks[peer].code = now_s + 0.01, 1

    def raise_(self, error: str, now_s: float, **words: Any) -> None:
        """An exception on all of them."""
        self.node.say(f"the ranks raise {error}")
        for rank, process in self.gang.ranks.items():
            self.node.pages[rank].say_farewell(error=error, traceback=f"Traceback\n{error}", **words)
            process.ended_s, process.code = now_s + 0.01 * rank, 1

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
            kept = self.node.arena.get(step)
            if kept is None and step in self.node.faults.torn:
                error = f"Unrestorable: cannot restore step {step}: checksum of slab 0 does not match"
                self.raise_(error, now_s, kind="snapshot", step=step, path=f"snapshots/{step}")
                return
            self.state = kept.state if kept else self.node.disk[step]
            self.odd = kept.odd if kept else self.node.job.odd.get(step, frozenset())
        self._live(RankPhase.TRAINING)
        self.paused = bool(self.node.pages[0].paused)
        for page in self.node.pages:
            page.restored_ns = _ns(now_s)
            page.tells = 1 if self.node.faults.fixed_data else 2
        if self.record.begins:
            self._take_course(self.record.begins, now_s)
        self.node.say(f"the ranks are in their loop at step {self.step}{', and wait' if self.paused else ''}")
        self._contribute(finite=True, staged=self.node.stage(self, durable=False))

    def _train(self, now_s: float) -> None:
        """One step, then what `Session.boundary` does; nothing where the state is that of the last step, or the ranks wait."""
        if self.paused and self._waits(now_s):
            return
        if self.step == self.node.total:
            self._leave(RankPhase.FINISHED, "the ranks find nothing left to do", now_s)
            return
        sample = windows.batch(self.step, self.windows) + 1
        if self.node.faults.spike_at.get(self.step + 1):
            self.node.faults.spike_at[self.step + 1] -= 1
            sample += HURT
        self.state = (*self.state, -sample if self.odd else sample)
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
        before = self._judged(now_s)
        if not self.alive:
            return
        if before and before.directive is Directive.REWIND:
            self._rewind(before, now_s)
            return
        leave = before is not None and before.directive is Directive.LEAVE
        wanted = last or (leave and before.snapshot) or self.step % self.node.durable_every == 0
        self._contribute(finite=finite, staged=finite and self._stage(wanted))
        judged = self._judged(now_s) if last or leave else None
        if judged and judged.directive is Directive.REWIND and not leave:
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

    def _stage(self, wanted: bool) -> bool:
        wanted |= self.node.pages[0].durable > self.asked
        if wanted:
            self.asked = self.node.pages[0].durable
            for page in self.node.pages:
                page.durable_step = self.step if page.durable_step < 0 else page.durable_step
        return self.node.stage(self, durable=wanted)

    def _waits(self, now_s: float) -> bool:
        """One look of ranks that are paused; whether they still wait."""
        if self.pending is None:
            self._contribute(finite=True, staged=self._stage(False))
        judged = self._judged(now_s)
        assert judged
        if judged.directive is Directive.REWIND:
            self._rewind(judged, now_s)
        elif judged.directive is Directive.LEAVE:
            self._contribute(finite=True, staged=self.node.stage(self, durable=judged.snapshot))
            self._judged(now_s)
            self._leave(RankPhase.STOPPED, "the ranks leave their loop as ordered", now_s)
        elif not self.paused:
            self.node.say("the ranks go on")
        for page in self.node.pages:
            page.doing, page.beat_ns = Doing.PAUSED if self.paused else Doing.STEP, _ns(now_s)
        return self.paused or judged.directive is not Directive.GO_ON

    def _take_course(self, order: RewindOrder, now_s: float) -> None:
        """The state that `order` names is restored: what `council.obey` does."""
        window = windows.following(order.to, order.skip, self.windows) if order.skip else None
        remedy = Remedy.SKIP if window else Remedy.REPLAY
        self.turns.append(Turn(kind=order.cause, onset=Step(order.to + 1), to=order.to, remedy=remedy, window=window))
        self.windows = windows.merged((*self.windows, *([window] if window else [])))
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

    def _go_back(self, to: int) -> None:
        self.state = self.node.arena[to].state if to in self.node.arena else self.node.disk[to]
        self.odd = self.node.arena[to].odd if to in self.node.arena else frozenset()
        self.figures = [figure for figure in self.figures if figure.step <= to]
        for step in [step for step in self.node.arena if step > to]:
            del self.node.arena[step]

    def _leave(self, phase: RankPhase, sentence: str, now_s: float) -> None:
        self._live(phase)
        self.node.say(sentence)
        if self.node.faults.hangs_in_teardown:
            self.hang("in its teardown")
            return
        for process in (*self.gang.ranks.values(), self.gang.launcher):
            process.ended_s, process.code = now_s, 0

    def _contribute(self, finite: bool, staged: bool) -> None:
        held = Held.WHOLE if staged else Held.MISSED
        rows = [
            row(
                Tally(
                    step=Step(self.step),
                    non_finite=not finite,
                    newest=held,
                    order=Order(page.order),
                    loss=self._loss() if finite and self.state else None,
                    fixed_data=self.node.faults.fixed_data,
                    rewind=page.ordered if page.ordered > self.obeyed else 0,
                    pause=bool(page.paused),
                )
            )
            for page in self.node.pages
        ]
        self.pending = tuple(map(max, *rows))

    def _judged(self, now_s: float) -> Judgement | None:
        """The judgement of the tally that is due, if one is; ranks that give up are not alive afterwards."""
        if self.pending is None:
            return None
        said, self.pending = tally(self.pending), None
        judgement = judge(said, self.figures, self.turns, self.node.judged_by)
        assert judgement.directive is not Directive.DIVERGED
        self.paused = judgement.pause
        if judgement.newest is Held.WHOLE and said.step in self.node.arena:
            self.node.arena[said.step].sealed = True
        if judgement.directive is Directive.GO_ON:
            self.figures.append(said.figure)
        if judgement.directive is Directive.GIVE_UP:
            assert judgement.finding
            past = ladder.same_fault(judgement.finding, self.turns, self.node.judged_by.ladder)
            words = {"kind": judgement.finding.kind.value, "step": judgement.finding.onset}
            done = describe.remedies([turn.remedy for turn in past])
            self.raise_(f"Incurable: {describe.finding(judgement.finding)} again, after {done}", now_s, **words)
        if judgement.rewind:
            if self._ordered_to() >= 0:
                return replace(judgement, directive=Directive.REWIND)
            self.obeyed = judgement.rewind
            for page in self.node.pages:
                page.declined = judgement.rewind
        return judgement

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
            self._go_back(to)
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
        sealed = {step: kept.state for step, kept in self.node.arena.items() if kept.sealed}
        held = {**self.node.disk, **sealed}
        to = max((s for s in sealed if s <= answer.at_most), default=-1)
        to = to if to >= 0 else max((s for s in held if s <= answer.at_most), default=-1)
        to = to if to >= 0 else max(step for step in held if step < finding.onset)
        past = ladder.same_fault(finding, self.turns, self.node.judged_by.ladder)
        window = answer.window(finding.onset, Step(to), self.windows)
        remedy = ladder.done(answer, past, Step(to))
        self.turns.append(Turn(kind=finding.kind, onset=finding.onset, to=Step(to), remedy=remedy, window=window))
        self.windows = windows.merged((*self.windows, *([window] if window else [])))
        self._go_back(to)
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
