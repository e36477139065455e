"""The training processes of the simulated node: plain values that step, stage, judge and die.

What they compute is the tuple of the samples they have used, so that a lost or repeated sample shows in the final state. They judge
their boundaries by the real rule, in the order of `training.session`, and write real board pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mt_resilient.agent.gang import Gang, Watched
from mt_resilient.checkpoint.header import Stamp
from mt_resilient.resilience.boundary import Directive, Held, Judgement, Tally, judge, row, tally
from mt_resilient.resilience.orders import GenerationRecord
from mt_resilient.resilience.signals import Order, RankPhase, Step

if TYPE_CHECKING:
    from .node import Node

State = tuple[int, ...]


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
    kill_at: dict[int, int] = field(default_factory=dict)
    """Step → how many times rank 1 will be killed right after it."""
    flip_at: dict[int, int] = field(default_factory=dict)
    """Step → how many times a bit of rank 1's copy will flip right after it. What is computed from it then is wrong on all ranks."""
    torn: set[int] = field(default_factory=set)
    """Steps whose snapshot on disk cannot be read."""
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
        self.replays: dict[int, int] = {}
        self.rewinds = 0
        for page in node.pages:
            page.clear(record.number)

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
        for page in self.node.pages:
            page.restored_ns = _ns(now_s)
        self.node.say(f"the ranks are in their loop at step {self.step}")
        self._contribute(finite=True, staged=self.node.stage(self, durable=False))

    def _train(self, now_s: float) -> None:
        """One step, then what `Session.boundary` does; nothing where the state is that of the last step."""
        if self.step == self.node.total:
            self._leave(RankPhase.FINISHED, "the ranks find nothing left to do", now_s)
            return
        self.state = (*self.state, -(self.step + 1) if self.odd else self.step + 1)
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
        finite = not self.node.faults.nan_at.get(self.step)
        if not finite:
            self.node.faults.nan_at[self.step] -= 1
            self.node.say(f"step {self.step} gives NaN")
        last = self.step == self.node.total
        before = self._judged(now_s)
        if not self.alive:
            return
        if before and before.directive is Directive.REWIND:
            self._rewind(before.step, now_s)
            return
        leave = before is not None and before.directive is Directive.LEAVE
        wanted = last or (leave and before.snapshot) or self.step % self.node.durable_every == 0
        self._contribute(finite=finite, staged=finite and self.node.stage(self, durable=wanted))
        judged = self._judged(now_s) if last or leave else None
        if judged and judged.directive is Directive.REWIND and not leave:
            self._rewind(judged.step, now_s)
            return
        if leave:
            self._leave(RankPhase.STOPPED, "the ranks leave their loop as ordered", now_s)
        elif last and self.alive:
            self._leave(RankPhase.FINISHED, "the ranks have done their last step", now_s)
        elif self.node.faults.kill_at.get(self.step):
            self.node.faults.kill_at[self.step] -= 1
            self.kill(1, now_s)

    def _leave(self, phase: RankPhase, sentence: str, now_s: float) -> None:
        self._live(phase)
        self.node.say(sentence)
        for process in (*self.gang.ranks.values(), self.gang.launcher):
            process.ended_s, process.code = now_s, 0

    def _contribute(self, finite: bool, staged: bool) -> None:
        held = Held.WHOLE if staged else Held.MISSED
        rows = [
            row(Tally(step=Step(self.step), non_finite=not finite, newest=held, order=Order(page.order)))
            for page in self.node.pages
        ]
        self.pending = tuple(map(max, *rows))

    def _judged(self, now_s: float) -> Judgement | None:
        """The judgement of the tally that is due, if one is; ranks that give up are not alive afterwards."""
        if self.pending is None:
            return None
        said, self.pending = tally(self.pending), None
        judgement = judge(said, self.replays.get(said.step, 0), self.node.policy.max_replays)
        assert judgement.directive is not Directive.DIVERGED
        if judgement.newest is Held.WHOLE:
            self.node.arena[said.step].sealed = True
        if judgement.directive is Directive.GIVE_UP:
            words = {"kind": "non_finite", "step": said.step}
            self.raise_(f"NonFinite: step {said.step} gave NaN or Inf after 2 replays of the same data", now_s, **words)
        if judgement.directive is Directive.REWIND:
            self.replays[said.step] = self.replays.get(said.step, 0) + 1
        return judgement

    def _rewind(self, onset: int, now_s: float) -> None:
        to = max(step for step, kept in self.node.arena.items() if kept.sealed)
        assert to < onset
        self.state, self.odd = self.node.arena[to].state, self.node.arena[to].odd
        self.rewinds += 1
        for page in self.node.pages:
            page.rewound(onset=onset, reached=page.step, to=to, at_ns=_ns(now_s), done_ns=_ns(now_s + 0.005))
        self.node.say(f"the ranks go back to step {to} in place")


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
