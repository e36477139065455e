"""What this rank says at each boundary, and what all ranks conclude from what all have said.

contribute ──row──▶ sentinel ──tally──▶ judged ──Judgement──▶ the session, which obeys
"""

from __future__ import annotations

from collections.abc import Sequence

from ..resilience import describe, ladder
from ..resilience.board import Rewound, Sighted
from ..resilience.boundary import Directive, Judgement, Tally, judge
from ..resilience.clock import monotonic_ns
from ..resilience.errors import BudgetSpent, InternalError
from ..resilience.ladder import Remedy, Turn
from ..resilience.signals import Order, Step
from ..resilience.spikes import Finding
from .attach import Attachment
from .course import Course
from .figures import Figures, finite
from .pace import Pace
from .rewind import Tape
from .sentinel import Sentinel


class Incurable(BudgetSpent):
    """The same fault came again whatever was done about it."""

    def __init__(self, finding: Finding, turns: Sequence[Turn]) -> None:
        done = describe.remedies([turn.remedy for turn in turns])
        super().__init__(f"{describe.finding(finding)} again, after {done}")
        self.farewell = {"kind": finding.kind.value, "step": finding.onset}


class Council:
    def __init__(self, at: Attachment, tape: Tape, course: Course, pace: Pace) -> None:
        """Collective: every rank makes its council at the same place of its program."""
        self._at, self._tape, self._course, self._pace = at, tape, course, pace
        self._sentinel = Sentinel(at)
        self._policy = at.handoff.policy
        self.stride = pace.stride
        """Steps between snapshots in memory: what all ranks agreed on last."""
        self._asked = 0
        """Snapshots on disk that the agent has asked for, and that all ranks know of."""
        self._rewind: Judgement | None = None
        """What the ranks go back for."""

    def contribute(self, step: int, sound: bool, fixed_data: bool, figures: Figures | None = None) -> None:
        """This rank's row of the state after `step` steps. sound: it holds no NaN or Inf, as far as is known."""
        known = figures if figures is not None and not figures.skipped else Figures()
        newest, earlier = self._tape.held
        said = Tally(
            step=Step(step),
            non_finite=not sound,
            newest=newest,
            earlier=earlier,
            stride=self._pace.stride,
            durable=self._at.local_rank == 0 and self._at.page.durable > self._asked,
            order=Order(self._at.page.order),
            loss=finite(known.loss),
            grad_norm=finite(known.grad_norm),
            fixed_data=fixed_data,
        )
        self._sentinel.contribute(said)

    def judged(self) -> Judgement | None:
        """React to the tally that is due, if one is. Raises Incurable when nothing helps."""
        said = self._sentinel.take()
        if said is None:
            return None
        judgement = judge(said, self._course.figures, self._course.turns, self._policy)
        self._tape.settle(judgement)
        if judgement.directive in (Directive.GO_ON, Directive.LEAVE):
            self.stride = judgement.stride
            self._course.judged(said.figure)
            if judgement.durable:
                self._tape.owed, self._asked = True, self._at.page.durable
            if judgement.finding is not None:
                self._sighted(judgement)
        if judgement.directive is Directive.GIVE_UP:
            assert judgement.finding is not None
            raise Incurable(
                judgement.finding, ladder.same_fault(judgement.finding, self._course.turns, self._policy.ladder)
            )
        if judgement.directive is Directive.DIVERGED:
            raise InternalError(f"the ranks are not at the same step: this one judged step {said.step}")
        if judgement.directive is Directive.REWIND:
            self._rewind = judgement
        return judgement

    def _sighted(self, judgement: Judgement) -> None:
        """Something is wrong, and these ranks only observe: note it for the agent, once per fault."""
        finding, answer, page = judgement.finding, judgement.answer, self._at.page
        assert finding is not None
        assert answer is not None
        before = page.sighting(page.sightings) if page.sightings else None
        if before and ladder.goes_on(before.kind, before.last, finding, self._policy.ladder):
            page.sighted_again(finding.seen)
            return
        hopeless = answer.remedy is Remedy.GIVE_UP
        to = -1 if hopeless else self._tape.newest(answer.at_most)
        to = self._tape.newest(finding.onset - 1) if to < 0 and not hopeless else to
        page.sighted(
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

    def turn_back(self) -> int:
        """All ranks, after REWIND: go back in place as the ladder says, and give the step."""
        assert self._rewind is not None
        finding, answer = self._rewind.finding, self._rewind.answer
        assert finding is not None
        assert answer is not None
        started = monotonic_ns()
        to = self._common(answer.at_most)
        if to < 0:
            to = self._common(finding.onset - 1)
        if to < 0:
            raise InternalError("no snapshot is left to go back to in place; the gang restarts from disk")
        past = ladder.same_fault(finding, self._course.turns, self._policy.ladder)
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
        self._at.page.rewound(
            Rewound(
                kind=turn.kind,
                onset=turn.onset,
                reached=self._at.page.step,
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
        while True:
            worst, best = self._sentinel.extremes(self._tape.newest(at_most))
            if worst == best:
                return worst
            at_most = worst  # what the poorest rank has; the others may not
