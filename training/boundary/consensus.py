"""What this rank reports at each boundary (the moment between two steps), and what all ranks conclude from all reports.

contribute ──row──▶ sentinel ──tally (the maximum of all rows)──▶ judged ──Judgement──▶ the session, which obeys
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...resilience.clock import monotonic_ns
from ...resilience.errors import BudgetSpent, InternalError
from ...resilience.inprocess import rewind_ladder
from ...resilience.inprocess.loss_level import Outcome
from ...resilience.inprocess.loss_spike import Finding
from ...resilience.inprocess.tally import (
    Directive,
    Held,
    Judgement,
    Tally,
    Wanted,
    blamed,
    judge,
    left_alone,
    row,
    tally,
)
from ...resilience.ipc.board_events import Sighted
from ...resilience.model.cause import Kind
from ...resilience.model.generation import RewindOrder
from ...resilience.model.rewind import Remedy, Turn
from ...resilience.model.types import Order, OrderedBy, Rank, Step
from ...resilience.text import sentences
from ..attach.attach import Attachment, ends_the_rank
from ..snapshot.reachable import Common
from ..snapshot.snapshot_pace import Pace
from ..snapshot.snapshots import Tape
from ..state.optimizers.accumulated_gradients import Accumulation
from .allreduce import Sentinel
from .fallback import Rescue
from .lineage import Course, note, obey
from .local_gradients import OwnGradients, culprits
from .step_metrics import Figures, finite

_SETTLED = Held.WHOLE, Held.WHOLE
"""What a rank reports of its snapshots once all ranks know their outcome. The value is then ignored."""


class Incurable(BudgetSpent):
    """The same fault recurred after every remedy."""

    def __init__(self, finding: Finding, turns: Sequence[Turn]) -> None:
        done = sentences.remedies([turn.remedy for turn in turns])
        super().__init__(f"{sentences.finding(finding)} again, after {done}")
        ends_the_rank(self, kind=finding.kind.value, step=finding.onset)


class Council:
    def __init__(
        self,
        at: Attachment,
        tape: Tape,
        course: Course,
        pace: Pace,
        rescue: Rescue,
        own: OwnGradients,
        accumulation: Accumulation,
    ) -> None:
        """Collective: every rank must create its council at the same point of its program."""
        self._at, self._tape, self._course, self._pace, self._rescue, self._own = at, tape, course, pace, rescue, own
        self._sentinel, self._accumulation = Sentinel(at), accumulation
        self._common = Common(tape.reachable, self._sentinel.greatest)
        self._policy = at.handoff.policy
        self.stride = pace.stride
        """Steps between snapshots in memory, as all ranks last agreed."""
        self._asked = (0, 0)
        """Numbers of the agent's last requests that all ranks know: for snapshots on disk, and for copies."""
        self._rewind: Judgement | RewindOrder | None = None
        """The reason for the next rewind."""
        self._obeyed = at.handoff.rewind.number if at.handoff.rewind else 0
        """Number of the last rewind order that was obeyed, or declined."""
        self._stepped = False
        """Whether the last contributed row has the figures of a step."""
        self._harmless = False
        """Whether the last NaN that came again in a replay did no harm. After a harmless NaN, the next NaN is not replayed."""
        self.paused = False
        """Whether all ranks wait before the next step."""
        self._fixed_data = True
        """Whether, for some rank, it is unknown which data its steps use."""

    def contribute(self, step: int, sound: bool, fixed_data: bool, figures: Figures | None) -> None:
        """Report this rank's row for the state after `step` steps. sound: the state contains no NaN or Inf, as far as is known. figures:
        None if no step was done since the last row. If the state is sound, the figures are finite."""
        self._stepped = figures is not None
        newest, earlier = self._tape.held if self._tape.unsettled else _SETTLED
        paused, ordered, order, durable, copies = self._at.page.asked
        wanted = Wanted.ON_DISK if durable > self._asked[0] else Wanted(copies > self._asked[1])
        loss = grad_norm = None
        if figures is not None and not figures.skipped:
            loss, grad_norm = figures.loss, figures.grad_norm
            if not sound:
                loss, grad_norm = finite(loss), finite(grad_norm)
        said = Tally(
            step=Step(step),
            non_finite=0 if sound else step + 1 - ((figures and figures.began) or step),
            newest=newest,
            earlier=earlier,
            stride=self._pace.stride,
            wanted=wanted if self._at.local_rank == 0 else Wanted.NOWHERE,
            order=Order(order),
            loss=loss,
            grad_norm=grad_norm,
            fixed_data=fixed_data,
            rewind=ordered if ordered > self._obeyed else 0,
            pause=bool(paused),
        )
        self._sentinel.contribute(row(said))

    def judged(self, following: Figures | None = None) -> Judgement | None:
        """React to the pending tally, if there is one. Collective if a rewind is ordered. Raises Incurable if no remedy has helped.
        following: the figures of the step after the judged one, if that step is done."""
        reduced = self._sentinel.take()
        if reduced is None:
            return None
        said = tally(reduced)
        course, watched = self._course, self._course.level.watch
        judgement = judge(said, course.figures if self._stepped else None, course.level, course.turns, self._policy)
        if judgement.waits and not self._policy.observe and self._culprits(judgement.finding):
            judgement = blamed(judgement, said, course.turns, self._policy.ladder)
        if judgement.directive in (Directive.REWIND, Directive.GIVE_UP) and self._does_no_harm(
            judgement.finding, following
        ):
            judgement = left_alone(said, judgement)
        self._tape.settle(judgement)
        self.paused, self._fixed_data = judgement.pause, said.fixed_data
        if judgement.directive in (Directive.GO_ON, Directive.LEAVE):
            self.stride = judgement.stride
            if self._stepped:
                course.judged(said.figure, judgement.level)
                if watched and not course.level.watch:
                    self._watch_ended(course.level.outcome, said.step)
            if judgement.wanted:
                page, disk = self._at.page, judgement.wanted is Wanted.ON_DISK
                self._tape.owed = max(self._tape.owed, judgement.wanted)
                self._asked = page.durable if disk else self._asked[0], page.copies
            if judgement.finding is not None:
                self._sighted(judgement)
        if judgement.directive is Directive.GIVE_UP:
            assert judgement.finding is not None
            raise Incurable(
                judgement.finding, rewind_ladder.same_fault(judgement.finding, self._course.turns, self._policy.ladder)
            )
        if judgement.directive is Directive.DIVERGED:
            raise InternalError(f"the ranks are not at the same step: this one judged step {said.step}")
        if judgement.directive is Directive.REWIND:
            self._rewind = judgement
        if judgement.rewind and self._can_obey():
            return judgement._replace(directive=Directive.REWIND)
        return judgement

    def settle(self) -> None:
        """Wait for running copies, and exchange their outcome with all ranks. Collective; no row may be pending."""
        self._tape.finish()
        newest, earlier = (Held(int(held)) for held in self._sentinel.greatest(*self._tape.held))
        self._tape.settle(Judgement(directive=Directive.GO_ON, newest=newest, earlier=earlier))

    def _sighted(self, judgement: Judgement) -> None:
        """Record a finding on which these ranks do not act, once per fault. If the ranks wait for the loss to fall again, keep the state
        before the finding on disk (collective)."""
        finding, answer, page = judgement.finding, judgement.answer, self._at.page
        assert finding is not None
        assert answer is not None
        for ordinal, told in page.open_sightings().items():
            if rewind_ladder.goes_on(told.kind, told.last, finding, self._policy.ladder):
                page.sighted_again(ordinal, finding.seen)
                return
        if judgement.waits and not self._policy.observe:
            to = self._common.newest(answer.at_most)
            self._tape.keep(to)
        else:
            kept = self._tape.reachable
            answer, to = rewind_ladder.goes_to(answer, finding, kept.newest, lambda: kept.oldest(0))
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

    def _does_no_harm(self, finding: Finding | None, following: Figures | None) -> bool:
        """Return whether a NaN that a replay has given again is gone in the following step, and has left the state of all ranks finite.
        Collective."""
        assert finding is not None
        if finding.kind is not Kind.NON_FINITE or finding.expected:
            return False
        past = rewind_ladder.same_fault(finding, self._course.turns, self._policy.ladder)
        if not (self._harmless or any(turn.kind == finding.kind for turn in past)):
            return False
        gone = following is not None and following.finite and not following.skipped
        self._harmless = self._sentinel.extremes(gone and self._accumulation.finite())[0] > 0
        return self._harmless

    def _can_obey(self) -> bool:
        """Return whether all ranks can rewind as ordered. If one rank cannot, all ranks decline the order for good."""
        page = self._at.page
        order = RewindOrder(
            number=page.ordered,
            to=Step(page.ordered_to),
            skip=page.ordered_skip,
            cause=tuple(OrderedBy)[page.ordered_by],
        )
        if order.cause is OrderedBy.COMPARISON:  # any older state is acceptable too
            order = replace(order, to=Step(self._common.newest(order.to)))
        elif not self._common.keeps(order.to):
            order = replace(order, to=Step(-1))
        if order.to < 0:
            self._obeyed, page.declined = order.number, order.number
            return False
        self._rewind = order
        return True

    def turn_back(self) -> int:
        """After REWIND, rewind all ranks in place, as the fault's remedy or the order requires. Return the step."""
        assert self._rewind is not None
        if isinstance(self._rewind, RewindOrder):
            started = monotonic_ns()
            self._go_back(self._rewind.to)
            self._tape.keep(
                self._rewind.to
            )  # an order sets all newer snapshots on disk aside, and this one may be in memory only
            self._obeyed = self._rewind.number
            obey(self._rewind, self._course, self._at, started, known_data=not self._fixed_data)
            self._rescue.turn(self._course.careful(self._rewind.to))
            return self._rewind.to
        finding, answer = self._rewind.finding, self._rewind.answer
        assert finding is not None
        assert answer is not None
        started = monotonic_ns()
        ranks = self._culprits(finding)
        answer, to = rewind_ladder.goes_to(answer, finding, self._common.newest, self._common.oldest)
        if to < 0:
            raise InternalError("no snapshot is left to go back to in place; the worker group restarts from disk")
        past = rewind_ladder.same_fault(finding, self._course.turns, self._policy.ladder)
        turn = Turn(
            kind=finding.kind,
            onset=finding.onset,
            to=Step(to),
            remedy=rewind_ladder.done(answer, past, Step(to)),
            window=answer.window(finding.onset, Step(to), self._course.windows),
        )
        self._go_back(to)
        self._course.turned(turn)
        self._course.went_back(to)
        self._rescue.turn(self._course.careful(to))
        note(self._at, turn, started, finding=finding, ranks=ranks)
        return to

    def _watch_ended(self, outcome: Outcome, step: int) -> None:
        for (
            ordinal,
            told,
        ) in self._at.page.open_sightings().items():  # empty if the watch began before these processes did
            if told.remedy is Remedy.WAIT:
                self._at.page.sighted_again(ordinal, step, outcome)

    def _culprits(self, finding: Finding | None) -> tuple[Rank, ...]:
        assert finding is not None
        return culprits(finding, self._own, self._sentinel, self._at.rank, self._at.world)

    def _go_back(self, to: int) -> None:
        if self._course.level.watch:
            self._watch_ended(Outcome.ACTED, self._at.page.step)
        self._rescue.turn(False)  # the state is restored without the rescue
        self._tape.rewinds += 1
        self._tape.go_back(to, course=self._common.courses[to])
        self._own.went_back(to)
