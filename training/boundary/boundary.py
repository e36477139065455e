"""Makes a training loop rewindable at its boundaries (the moments between two steps), for the script's own loop and for frameworks' loops.

row (this rank's report) ◀── council ──▶ judgement: continue, rewind, leave. Before the next step: a snapshot, a pause or a rescue, if due.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...checkpoint.durable.save_interval import AUTO
from ...resilience.clock import monotonic_ns, sleep
from ...resilience.errors import SnapshotError, StateError, UsageError
from ...resilience.inprocess.tally import COURSE, RANDOMNESS, Directive, Held, Judgement, Wanted
from ...resilience.model.rewind import REPLAYS
from ...resilience.model.types import Doing, RankPhase
from ..attach import marks
from ..attach.attach import Attachment, attach
from ..snapshot.snapshot_pace import Pace
from ..snapshot.snapshots import Tape
from ..state.optimizers.accumulated_gradients import Accumulation
from ..state.optimizers.optimizers import Optimizers
from ..state.sources import Modules, sources_of
from ..state.values.value_source import Values
from .consensus import Council
from .fallback import Rescue
from .lineage import Course
from .local_gradients import OwnGradients
from .loop_start import first_boundary, restore, shown, tell, tell_of_what_is_missing, unless_looped
from .repetition import Repetition
from .step_metrics import Figures, Skips
from .step_timer import OwnTime
from .watch_threads import unwatch, watch

_LAST_SNAPSHOT_S = 60.0
"""The most seconds that the last snapshot waits for a slot that is still being written to disk."""
_LOOK_S = 0.05
"""Seconds between two polls by a rank that is paused, or whose node's lease may have expired."""


class Boundaries:
    """One rank's training from boundary to boundary, watched by the agent. Outside of `mt-resilient run`, Boundaries does nothing."""

    def __init__(self, **sources: Any) -> None:
        """sources: the objects to save, by name; `sources.sources_of` says which objects are accepted."""
        if taken := {RANDOMNESS, COURSE} & sources.keys():
            raise UsageError(f"Session({min(taken)}=…): this name is the session's own; call it something else")
        self._at: Attachment | None = unless_looped(attach())
        try:
            self._sources = sources_of(sources, self, look_through=self._at is not None)
        except SnapshotError as error:
            raise StateError(str(error)) from None
        self._models = [source for source in self._sources.values() if isinstance(source, Modules)]
        self.fixed_data = True
        """True: it is not known which data a step uses, because the loop neither reads `data_step` nor iterates over `batches`. While
        `fixed_data` is True, the session can neither repeat nor skip data."""
        self.puts_data_back = False  # True: the position in the data is restored all the same, but none is skipped
        self.cure = "get the batches from session.batches(loader), or fetch the batch with the number session.data_step (docs/data.md)"
        """What to do if it is unknown which data a step uses."""
        self._missing: list[Any] = []
        """Optimizers and schedulers that change in the training and are in no snapshot, as far as is known."""
        self._first = True
        self._postponed: Judgement | None = None
        """A judgement to leave that could not be carried out where it was made."""
        if self._at is None:
            return
        self._page, self._handoff = self._at.page, self._at.handoff
        self._page.built_ns, self._page.phase = monotonic_ns(), RankPhase.RESTORING
        self._pace, self._skips = Pace(self._handoff.every_steps), Skips()
        self._left_ns, self._copying = 0, False  # when the present step began, and whether copies were under way then
        self._repetition = Repetition(self._page, next(iter(self._handoff.reached[self._at.local_rank :]), None))
        self._sources[COURSE] = self._course = Course(self._handoff)
        self._tape = Tape(self._at, self._sources, self._pace)
        self._rescue = Rescue(self._handoff.policy.rescue, self._sources.values())
        chunks = (chunk for model in self._models for chunk in model.chunks)
        self._own_gradients = OwnGradients(chunks, noted=self._at.world > 1, observes=self.observes)
        optimizers = [source for source in self._sources.values() if isinstance(source, Optimizers)]
        others = [source for source in self._sources.values() if isinstance(source, Values)]
        self._accumulation = self._tape.alone.gradients = Accumulation(self._models, optimizers, others, self._tell)
        self._own_time = OwnTime(self._page) if self._at.world > 1 and not self._tape.devices else None
        """None: this rank's own time is not measured, because there is a single rank, or the rank uses a device."""

    def _tell(self, sentence: str) -> None:
        """Print the sentence, only on rank 0 and only in a watched rank."""
        if self._at is not None:
            tell(self._at, sentence)

    @property
    def observes(self) -> bool:
        """Whether faults are only reported, and the loop runs as without this program."""
        return self._at is None or self._handoff.policy.observe

    def restore(self) -> int | None:
        """Restore the state that the agent chose for this generation. Return its step; None: there is no such state."""
        self._at = unless_looped(self._at)
        return restore(self._at, self._tape, self._course, known_data=not self.fixed_data) if self._at else None

    @property
    def rewinds(self) -> int:
        """How often the ranks have rewound since they started."""
        return 0 if self._at is None else self._tape.rewinds

    def begin(self, step: int, total: object = None) -> int:
        """Call this right before the first step, with the state after `step` of `total` steps. Collective. Waits and rewinds as ordered.
        Returns the step to begin with; call `resume` before it."""
        if self._at is None:
            return step
        self._tape.restorer.restore_randomness()
        parts = self._tape, self._course, self._pace, self._rescue, self._own_gradients, self._accumulation
        self._council = Council(self._at, *parts)
        for model in self._models:
            model.excuse()
        self._page.restored_ns, self._page.total, self._page.phase = monotonic_ns(), shown(total), RankPhase.TRAINING
        watch(self._at, self._tape.device)
        self._page.tells = 2 if not self.fixed_data else 3 if self.puts_data_back else 1
        self._rescue.turn(self._course.careful(step))
        first = self._tape.owed  # set if the job starts from another job's snapshot
        self._tape.record(step, first)
        if first:
            self._page.step = step
            self._tape.finish()
        self._council.contribute(step, True, self.fixed_data, None)
        return self._enter(step)

    def boundary(self, step: int, figures: Figures, *, judged_now: bool = False, last: bool = False) -> Directive:
        """Call this after each step: `step` steps are done, and `figures` are those of the last step.

        Judges the step before (or, with `judged_now`, this step), takes snapshots, writes heartbeats. `last`: save this step on disk. All
        ranks get the same directive at the same step. Raises Incurable if no remedy has helped.
        """
        if self._at is None:
            return Directive.GO_ON
        self._leased()
        entered = monotonic_ns()
        if self._own_time:
            self._own_time.end(entered)
        if self._left_ns:
            self._pace.stepped((entered - self._left_ns) / 1e9, beside=self._copying)
        self._own_gradients.stepped(step)
        figures = self._skips.look(step, figures, self._accumulation.crossed(), self._accumulation.held_back)
        loss, grad_norm = figures.loss, figures.grad_norm
        said = math.nan if loss is None else loss, math.nan if grad_norm is None else grad_norm
        self._page.beat(step, *said, entered)
        self._repetition.crossed(step, *said)
        if self._first:
            self._first = False
            self._rescue.check()
            first_boundary(self._at, self._course.windows, self.cure if self.fixed_data else "", self.puts_data_back)
            self._missing = tell_of_what_is_missing(self._at, self._sources.values())
            self._page.first_step = step
            self._page.stepped_ns = entered  # from here on the agent may start the warm process
        marks.leave()
        if step == self._handoff.replay_until:
            self._page.replayed_ns = entered
        directive, held_ns = self._cross(step, figures, judged_now, last), 0
        if directive is Directive.GO_ON and self._council.paused and not last:
            began, directive = monotonic_ns(), self._hold(step)
            held_ns = monotonic_ns() - began
        if directive is Directive.LEAVE:
            unwatch(self._page, RankPhase.STOPPED)
        self._left_ns, self._copying = monotonic_ns(), Held.UNDER_WAY in self._tape.held
        self._page.stalled(self._left_ns - entered - held_ns)
        if self._own_time:
            self._own_time.begin(self._left_ns)
        return directive

    def _cross(self, step: int, figures: Figures | None, judged_now: bool, last: bool) -> Directive:
        """Read what all ranks reported of the step before, save this step, and report its figures. figures: None if already reported."""
        before, self._postponed = self._council.judged(figures) or self._postponed, None
        if before and before.directive is Directive.REWIND:
            return Directive.REWIND
        leave = before is not None and before.directive is Directive.LEAVE
        wanted = last or bool(leave and before and before.snapshot)
        durable = self._handoff.durable_every_steps
        if durable != AUTO and step % durable == 0:
            self._tape.owed = Wanted.ON_DISK
        due = wanted or self._tape.owed is Wanted.ON_DISK or self._pace.due(step, self._council.stride)
        finite = figures is None or figures.finite
        if wanted:  # the snapshot may wait for a slot
            self._page.doing = Doing.CHECKPOINT
        if wanted and self._tape.unsettled:  # earlier copies may hold every slot until their outcome is known
            self._council.settle()
        if due and (wanted or self._tape.may_record()):
            where = Wanted.ON_DISK if wanted else self._tape.owed
            self._accumulation.ends, self._accumulation.doubtful = last, figures is None or figures.began > 0
            finite = self._tape.record(step, where, finite=finite, patience_s=_LAST_SNAPSHOT_S if wanted else 0.0)
        if judged_now or leave:
            self._tape.finish()
        self._council.contribute(step, finite and self._tape.finite, self.fixed_data, figures)
        directive = Directive.LEAVE if leave else Directive.GO_ON
        if judged_now or leave:
            now = self._council.judged()
            if now and now.directive is Directive.REWIND:
                directive, self._postponed = Directive.REWIND, before if leave else None
            elif now and now.directive is Directive.LEAVE and not leave and not last:
                self._postponed = now  # the requested snapshot is that of the next step, after which the ranks leave
        if wanted:
            self._page.doing = Doing.STEP
        if self._course.turns:
            self._rescue.turn(self._course.careful(step))
        return directive

    def _hold(self, step: int, leaves: bool = True) -> Directive:
        """Wait while a pause is ordered, and obey other orders meanwhile. leaves: this is a boundary, so the loop can be left here."""
        try:
            while True:
                judgement = self._council.judged()
                if judgement is None:
                    self._council.contribute(step, self._tape.finite, self.fixed_data, None)
                    continue
                if judgement.directive is Directive.LEAVE:
                    self._postponed = judgement
                    return self._cross(step, None, judged_now=False, last=False) if leaves else Directive.GO_ON
                if judgement.directive is not Directive.GO_ON or not judgement.pause:
                    return judgement.directive
                self._page.doing, self._page.beat_ns = Doing.PAUSED, monotonic_ns()
                sleep(_LOOK_S)
                if self._tape.owed and self._tape.may_record():
                    self._tape.record(step, self._tape.owed)
                self._council.contribute(step, self._tape.finite, self.fixed_data, None)
        finally:
            self._page.doing = Doing.STEP

    def _leased(self) -> None:
        """Wait while this node's lease may have expired, because other nodes may have restarted without it. The agent then ends this
        process, or reports that they did not restart. Ranks check this themselves, because the agent may be delayed."""
        while 0 < self._page.until_ns < monotonic_ns():
            sleep(_LOOK_S)

    def _enter(self, step: int) -> int:
        """Right before a first step, with the state after `step` steps, wait and rewind as ordered. Return the step to continue from."""
        while self._hold(step, leaves=False) is Directive.REWIND:
            step = self._turn_back()
        self._leased()
        return step

    def jump(self, step: int) -> int:
        """Return how many batches are skipped between step `step` and the next one."""
        return 0 if self._at is None else self._course.jump(step)

    def close(self, step: int) -> Directive:
        """Judge the last step now, and save it on disk. Call this if the loop finds only after the boundary that this was the last step."""
        if self._at is None:
            return Directive.GO_ON
        self._leased()
        return self._cross(step, None, judged_now=True, last=True)

    def rewind(self) -> int:
        """After REWIND, rewind all ranks in place, as the judgement requires. Return the step. Call `resume` before the next step."""
        self._left_ns = 0
        return self._enter(self._turn_back())

    def _turn_back(self) -> int:
        reached, step, turn = self._page.step, self._council.turn_back(), self._course.turns[-1]
        self._repetition.went_back(step, turn.onset if turn.remedy in REPLAYS else step)
        marks.due("The ranks rewound in place", max(reached, step), step)
        return step

    def resume(self) -> None:
        """Restore the generators again, after new data iterators were created."""
        if self._at is not None:
            self._tape.restorer.restore_randomness()

    @contextmanager
    def same_randomness(self) -> Iterator[None]:
        """Restore the generators after this block, so that the random numbers drawn in it have no effect."""
        kept = self._tape.alone.generators.collect()
        yield
        self._tape.alone.generators.restore(kept)

    def finish(self, complete: bool = True) -> None:
        """Record that the loop has ended and its last step was judged. complete: False if the loop ends early on purpose."""
        if self._at is not None:
            self._tape.close()
            if self._page.phase != RankPhase.STOPPED:
                unwatch(self._page, RankPhase.FINISHED if complete else RankPhase.STOPPED)

    def leave(self) -> None:
        """Record that the script has left the loop before its end: the agent no longer expects progress of this rank."""
        if self._at is not None:
            unwatch(self._page, RankPhase(self._page.phase))
            self._page.doing = Doing.LEFT

    @contextmanager
    def pausing(self, what: str) -> Iterator[None]:
        """Wrap what the loop does between two steps and may take long: `evaluation` or `checkpoint`. The limit of the rank's silence is
        then `hang.evaluation_s` or `hang.checkpoint_s`, not that of a step."""
        if what not in ("evaluation", "checkpoint"):
            raise UsageError(f"session.pausing takes 'evaluation' or 'checkpoint', not {what!r}")
        if self._at is not None:
            self._page.doing = Doing[what.upper()]
            if self._own_time:
                self._own_time.drop()
        try:
            yield
        finally:
            if self._at is not None:
                self._page.doing = Doing.STEP
