"""The session: what a training loop does at its boundaries so that it can be rewound. Both ways in end here.

Ten lines in a loop of one's own:

    session = Session(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in session.steps(1000):
        loss, grad_norm = train_step(step)
        session.report(loss=loss, grad_norm=grad_norm)

Outside of `mt-resilient run` a session is inert and the loop runs as if it were not there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import stores
from ..checkpoint.cadence import AUTO
from ..resilience import describe, ladder
from ..resilience.board import Rewound, Sighted
from ..resilience.boundary import COURSE, Directive, Judgement, Tally, judge
from ..resilience.clock import monotonic_ns
from ..resilience.errors import BudgetSpent, InternalError, UsageError
from ..resilience.ladder import Remedy, Turn
from ..resilience.signals import Doing, Order, RankPhase, Step
from ..resilience.spikes import Finding
from . import modules
from .attach import Attachment, attach
from .course import Course
from .own_time import OwnTime
from .pace import Pace
from .restoring import RANDOMNESS
from .rewind import Tape
from .sentinel import Sentinel
from .state import Modules, source_of

_LAST_SNAPSHOT_S = 60.0
"""How long the last snapshot of a run waits for a slot that is still being written to disk."""


@dataclass(frozen=True)
class Figures:
    """What one step gave, as this rank knows it; None where it does not (the loss on all but the last pipeline stage)."""

    loss: float | None = None
    grad_norm: float | None = None
    skipped: bool = False
    """The optimizer left the step out by itself (a loss scaler that found an overflow): its figures are not judged."""

    @property
    def finite(self) -> bool:
        return self.skipped or all(math.isfinite(x) for x in (self.loss, self.grad_norm) if x is not None)


class Incurable(BudgetSpent):
    """The same fault came again whatever was done about it."""

    def __init__(self, finding: Finding, turns: Sequence[Turn]) -> None:
        done = describe.remedies([turn.remedy for turn in turns])
        super().__init__(f"{describe.finding(finding)} again, after {done}")
        self.farewell = {"kind": finding.kind.value, "step": finding.onset}


class Session:
    """One rank's training under the agent's eye. `sources` by name: see `state.source_of` for what can be one."""

    def __init__(self, **sources: Any) -> None:
        if taken := {RANDOMNESS, COURSE} & sources.keys():
            raise UsageError(f"Session({min(taken)}=…): this name is the session's own; call it something else")
        self._sources = {name: source_of(name, thing) for name, thing in sources.items() if thing is not None}
        self._at: Attachment | None = attach()
        self._figures = Figures()
        self.fixed_data = True
        """The loop has no way to leave data out, as far as is known: it has not asked for `data_step`."""
        self._step = 0
        self._first = True
        self._counting = False
        self._postponed: Judgement | None = None
        """An order to leave that could not be carried out where it was judged."""
        if self._at is None:
            return
        self._page, self._handoff = self._at.page, self._at.handoff
        self._page.built_ns = monotonic_ns()
        self._page.phase = RankPhase.RESTORING
        self._pace = Pace(self._handoff.every_steps)
        self._stride = self._pace.stride
        """Steps between snapshots in memory: what all ranks agreed on last."""
        self._asked = 0
        """Snapshots on disk that the agent has asked for, and that all ranks know of."""
        self._left_ns = 0
        self._course = Course(self._handoff)
        self._sources[COURSE] = self._course
        self._rewind: Judgement | None = None
        """What the ranks go back for."""
        self._tape = Tape(self._at, self._sources, self._pace)
        self._sentinel: Sentinel | None = None
        self._own = OwnTime(self._page) if self._at.world > 1 and not self._tape.on_device else None
        """None where it can't be told: alone, or on a device."""

    @property
    def observes(self) -> bool:
        """Whether what is found wrong is told only, and the loop stays as its own script has made it."""
        return self._at is None or self._handoff.policy.observe

    # -- a loop of one's own -------------------------------------------------------------------------------------------

    def steps(self, total: int) -> Iterator[int]:
        """Indexes of the steps still to be computed, 0-based; after a rewind they start again from the restored step.

        The last step is judged before the iterator ends, so the loop never ends on a state that was not.
        """
        if self._counting:
            raise UsageError(
                "a Session counts the steps of one loop: call steps() once, and give it the whole number of them"
            )
        self._counting = True
        restored = self.restore()
        step = self.begin(restored if restored is not None else 0)
        while step < total:
            self._step = step
            yield step
            step += 1
            judgement = self.boundary(step, self._figures, judged_now=step == total, last=step == total)
            self._figures = Figures()
            if judgement is Directive.REWIND:
                step = self.rewind()
                self.resume()
            elif judgement is Directive.LEAVE:
                return
        self.finish()

    @property
    def data_step(self) -> int:
        """Which batch the present step is to use, counted from 0: the step itself, unless data was left out before it. A loop that takes
        its batches by this number lets a recovery leave out the data that a spike comes from."""
        self.fixed_data = False
        return self._step if self._at is None else self._course.batch(self._step)

    def report(self, *, loss: Any = None, grad_norm: Any = None, skipped: bool = False) -> None:
        """The figures of the step just computed: floats or one-element tensors. What is not reported is not judged, but no snapshot
        is kept whose parameters hold NaN or Inf."""
        self._figures = Figures(_number(loss), _number(grad_norm), skipped)

    @contextmanager
    def pausing(self, what: str) -> Iterator[None]:
        """Around what the loop does between two steps and may take long, `evaluation` or `checkpoint`: its silence is measured by
        `hang.evaluation_s` or `hang.checkpoint_s` then, and not by the steps."""
        if what not in ("evaluation", "checkpoint"):
            raise UsageError(f"a session pauses for an evaluation or a checkpoint, not for {what!r}")
        if self._at is not None:
            self._page.doing = Doing[what.upper()]
            if self._own:
                self._own.drop()
        try:
            yield
        finally:
            if self._at is not None:
                self._page.doing = Doing.STEP

    # -- what the hooks of other people's loops call ---------------------------------------------------------------------

    def restore(self) -> int | None:
        """Go back to the state that the agent chose for this generation; its step, or None where there is none."""
        if self._at is None:
            return None
        if self._handoff.resume_step < 0 and self._handoff.origin:
            self._tape.owed = True  # and a snapshot of one's own on disk as soon as may be
            step = self._tape.start_from(stores.at(self._handoff.origin))
        elif self._handoff.resume_step < 0:
            return None
        else:
            step = self._handoff.resume_step
            self._tape.go_back(step)
        self._course.went_back(step)
        return step

    def begin(self, step: int) -> int:
        """Right before the first step, at the state after `step` steps. Collective. Gives `step` back."""
        if self._at is None:
            return step
        self._tape.restore_randomness()
        if self._sentinel is None:
            self._sentinel = Sentinel(self._at)
        self._page.restored_ns = monotonic_ns()
        self._page.phase = RankPhase.TRAINING
        first = self._tape.owed  # of a job that begins with another's state
        self._tape.record(step, durable=first)
        if first:
            self._page.step = step
            self._tape.finish()
        self._contribute(step, finite=True)
        if first:
            self._judged()
        return step

    def boundary(self, step: int, figures: Figures, *, judged_now: bool = False, last: bool = False) -> Directive:
        """After each step: `step` steps are done, `figures` are the last one's.

        Judges the step before (or, with `judged_now`, this very one), snapshots, beats. `last`: keep this step on disk.
        All ranks get the same directive at the same step. Raises Incurable when nothing helps.
        """
        if self._at is None or self._sentinel is None:
            return Directive.GO_ON
        entered = monotonic_ns()
        if self._own:
            self._own.end()
        if self._left_ns:
            self._pace.stepped((entered - self._left_ns) / 1e9)
        self._page.beat(step, _or_nan(figures.loss), _or_nan(figures.grad_norm), entered)
        if self._first:
            self._first_boundary(entered)
        if step == self._handoff.replay_until:
            self._page.replayed_ns = entered
        before = self._judged() or self._postponed
        self._postponed = None
        if before is not None and before.directive is Directive.REWIND:
            return Directive.REWIND
        leave = before is not None and before.directive is Directive.LEAVE
        wanted = last or bool(leave and before and before.snapshot)
        durable = self._handoff.durable_every_steps
        self._tape.owed |= durable != AUTO and step % durable == 0
        due = wanted or self._tape.owed or step % self._stride == 0
        finite = figures.finite
        if wanted:  # it may wait for a slot
            self._page.doing = Doing.CHECKPOINT
        if due and (wanted or self._tape.may_record()):
            finite = finite and self._parameters_finite()
            self._tape.record(
                step, wanted or self._tape.owed, finite=finite, patience_s=_LAST_SNAPSHOT_S if wanted else 0.0
            )
        if judged_now or leave:
            self._tape.finish()
        self._contribute(step, finite and self._tape.finite, figures)
        directive = Directive.LEAVE if leave else Directive.GO_ON
        if judged_now or leave:
            now = self._judged()
            if now is not None and now.directive is Directive.REWIND:
                directive, self._postponed = Directive.REWIND, before if leave else None
            elif now is not None and now.directive is Directive.LEAVE and not leave and not last:
                self._postponed = now  # this step is not the snapshot that was asked for: the next one is, and leaves
        if directive is Directive.LEAVE:
            self._page.phase = RankPhase.STOPPED
        self._page.doing = Doing.STEP
        self._left_ns = monotonic_ns()
        self._page.stall_ns += self._left_ns - entered
        if self._own:
            self._own.begin()
        return directive

    def jump(self, step: int) -> int:
        """How many batches are left out between the step that has brought the state after `step` steps and the next one."""
        return 0 if self._at is None else self._course.jump(step)

    def rewind(self) -> int:
        """All ranks, after REWIND: go back in place as the ladder says, and give the step. `resume` comes before the next step."""
        assert self._at is not None
        assert self._rewind is not None
        finding, answer = self._rewind.finding, self._rewind.answer
        assert finding is not None
        assert answer is not None
        started, self._left_ns = monotonic_ns(), 0
        to = self._common(answer.at_most)
        if to < 0:
            to = self._common(finding.onset - 1)
        if to < 0:
            raise InternalError("no snapshot is left to go back to in place; the gang restarts from disk")
        past = ladder.same_fault(finding, self._course.turns, self._handoff.policy.ladder)
        turn = Turn(
            kind=finding.kind,
            onset=finding.onset,
            to=Step(to),
            remedy=ladder.done(answer, past, Step(to)),
            window=answer.window(finding.onset, Step(to), self._course.windows),
        )
        self._tape.rewinds += 1
        self._tape.go_back(to)
        self._course.turned(turn)
        self._course.went_back(to)
        self._page.rewound(
            Rewound(
                kind=turn.kind,
                onset=turn.onset,
                reached=self._page.step,
                to=to,
                remedy=turn.remedy,
                window=turn.window,
                value=finding.value,
                expected=finding.expected,
                at_ns=started,
                done_ns=monotonic_ns(),
            )
        )
        return to

    def _common(self, at_most: int) -> int:
        """The newest step up to `at_most` that every rank can go back to, -1 for none. Collective."""
        assert self._sentinel is not None
        while True:
            worst, best = self._sentinel.extremes(self._tape.newest(at_most))
            if worst == best:
                return worst
            at_most = worst  # what the poorest rank has; the others may not

    def resume(self) -> None:
        """Put the generators back once more, after data iterators were built anew."""
        if self._at is not None:
            self._tape.restore_randomness()

    @contextmanager
    def same_randomness(self) -> Iterator[None]:
        """What is drawn from the generators within does not count."""
        kept = self._tape.randomness.collect()
        yield
        self._tape.randomness.restore(kept)

    def finish(self, complete: bool = True) -> None:
        """The loop is over and its last step was judged. Not `complete`: it ends here by its own will, and may be gone on with."""
        if self._at is not None and self._page.phase != RankPhase.STOPPED:
            self._page.phase = RankPhase.FINISHED if complete else RankPhase.STOPPED

    # -- inside -------------------------------------------------------------------------------------------------------

    def _judged(self) -> Judgement | None:
        """React to the tally that is due, if one is."""
        assert self._sentinel is not None
        said = self._sentinel.take()
        if said is None:
            return None
        judgement = judge(said, self._course.figures, self._course.turns, self._handoff.policy)
        self._tape.settle(judgement)
        if judgement.directive in (Directive.GO_ON, Directive.LEAVE):
            self._stride = judgement.stride
            self._course.judged(said.figure)
            if judgement.durable:
                self._tape.owed, self._asked = True, self._page.durable
            if judgement.finding is not None:
                self._sighted(judgement)
        if judgement.directive is Directive.GIVE_UP:
            assert judgement.finding is not None
            policy = self._handoff.policy.ladder
            raise Incurable(judgement.finding, ladder.same_fault(judgement.finding, self._course.turns, policy))
        if judgement.directive is Directive.DIVERGED:
            raise InternalError(f"the ranks are not at the same step: this one judged step {said.step}")
        if judgement.directive is Directive.REWIND:
            self._rewind = judgement
        return judgement

    def _sighted(self, judgement: Judgement) -> None:
        """Something is wrong, and these ranks only observe: note it for the agent, once per fault."""
        finding, answer = judgement.finding, judgement.answer
        assert finding is not None
        assert answer is not None
        before = self._page.sighting(self._page.sightings) if self._page.sightings else None
        if before and ladder.goes_on(before.kind, before.last, finding, self._handoff.policy.ladder):
            self._page.sighted_again(finding.seen)
            return
        hopeless = answer.remedy is Remedy.GIVE_UP
        to = -1 if hopeless else self._tape.newest(answer.at_most)
        to = self._tape.newest(finding.onset - 1) if to < 0 and not hopeless else to
        self._page.sighted(
            Sighted(
                kind=finding.kind,
                onset=finding.onset,
                seen=finding.seen,
                last=finding.seen,
                to=to,
                remedy=answer.remedy,
                window=answer.window(finding.onset, Step(to), self._course.windows),
                value=finding.value,
                expected=finding.expected,
                at_ns=monotonic_ns(),
            )
        )

    def _contribute(self, step: int, finite: bool, figures: Figures | None = None) -> None:
        assert self._sentinel is not None
        known = figures if figures is not None and not figures.skipped else Figures()
        newest, earlier = self._tape.held
        said = Tally(
            step=Step(step),
            non_finite=not finite,
            newest=newest,
            earlier=earlier,
            stride=self._pace.stride,
            durable=self._at is not None and self._at.local_rank == 0 and self._page.durable > self._asked,
            order=Order(self._page.order),
            loss=_finite(known.loss),
            grad_norm=_finite(known.grad_norm),
            fixed_data=self.fixed_data,
        )
        self._sentinel.contribute(said)

    def _parameters_finite(self) -> bool:
        """Whether this rank's parameters are free of NaN and Inf: the gradient norm does not tell. Megatron leaves copies of a
        parameter on other tensor-parallel ranks out of it, so a NaN in one of those passes it by (met with TP2). On a device they are
        looked at on their way out (`offload.py`), so that nobody waits."""
        tensors = [t for s in self._sources.values() if isinstance(s, Modules) for t in s.tensors().values()]
        with torch.no_grad():
            sums = [t.sum(dtype=torch.float32) for t in tensors if t.device.type == "cpu" and t.is_floating_point()]
            return not sums or bool(torch.isfinite(torch.stack(sums)).all())

    def _first_boundary(self, now_ns: int) -> None:
        self._first = False
        assert self._at is not None
        if self._course.windows and self.fixed_data:
            left_out = ", ".join(map(describe.batches, self._course.windows))
            raise UsageError(
                f"{left_out} of the data are to be left out, but this script does not take its batches by session.data_step: let it, or "
                "leave --skip-data out"
            )
        if self._at.local_rank == 0:
            modules.note(Path(self._handoff.modules))
        self._page.stepped_ns = now_ns  # from here on the agent may start the warm process


def _number(value: Any) -> float | None:
    return None if value is None else float(value.detach() if torch.is_tensor(value) else value)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
