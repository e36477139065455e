"""The session: ten lines in your own training loop make the loop rewindable.

    session = Session(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in session.steps(1000):
        loss, grad_norm = train_step(step)
        session.report(loss=loss, grad_norm=grad_norm)

Outside of `mt-resilient run`, a session is inert and the loop runs as if it were not there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch

from ..resilience.errors import UsageError
from ..resilience.inprocess.tally import Directive
from .attach.rank_stderr import say
from .boundary.boundary import Boundaries
from .boundary.loop_start import length
from .boundary.step_metrics import Figures, number
from .data.batches import OVER, Batches
from .data.loader_adapters import Loadable
from .data.notices import Beside, ReadAhead
from .data.worker_start import Started
from .state.optimizers.optimizers import Optimizers
from .state.step_counts import StepCounts, counts_steps
from .state.tensors.finite_check import sums
from .state.tensors.in_place import local
from .variables import changed_objects, loop_variables
from .variables.changed_objects import ChangedObjects
from .variables.loop_variables import moved_on
from .variables.saved_objects import is_within
from .variables.script_generators import Generators

_CHANGES_THE_MODEL = (
    "going back to a position in the data has changed the model: begin_epoch= or the loader does that. A recovery within an epoch calls "
    "begin_epoch again, so training continues with other weights than before. Change the model in the loop instead, at the first step of "
    "an epoch (docs/data.md)"
)


class Session(Boundaries):
    """Makes your own loop recoverable. `sources`: the objects to save, by name; `sources.sources_of` says which objects are accepted."""

    def __init__(self, **sources: Any) -> None:
        counting = {name: thing for name, thing in sources.items() if counts_steps(thing)}
        super().__init__(**{name: thing for name, thing in sources.items() if name not in counting})
        self._given = [*sources.values()]
        self._named: list[str] = []
        self._changed = ChangedObjects()
        self._figures = Figures()
        self._step = 0
        self._counting = False
        self._data: Batches | None = None
        self._ahead = ReadAhead((), say)
        self._beside = Beside(self._tell)
        if self._at is not None:
            self._tape.alone.counts = self._counts = StepCounts(counting)
            self._tape.alone.loaders = self._started = Started(self._beside.made)
            self._tape.alone.variables = self._generators = Generators()
        self.complete = False
        """Whether all steps are done and the last one was judged: the code after the loop may then save the final state. False if the loop
        ends earlier, for a drain, a preemption or a stop; the same command then continues the training."""

    def steps(self, total: int, start: int = 0) -> Iterator[int]:
        """Return the indexes of the steps still to compute, 0-based. After a rewind, they start again from the restored step. start: the
        number of steps in a checkpoint that the script loaded. If the job has a snapshot, the snapshot replaces the loaded state.

        The last step is judged before the iterator ends, so the loop never ends with a state that was not judged.
        """
        return (step for step, _ in self._steps(total, None, start))

    def batches(
        self,
        loader: Loadable,
        total: int | None = None,
        *,
        epochs: int | None = None,
        accumulate: int = 1,
        begin_epoch: Callable[[int], None] | None = None,
    ) -> Iterator[tuple[int, Any]]:
        """Like `steps`, but yield each step with its batch. `loader` is read until `total` steps are done or `epochs` are over. Each
        recovery rewinds the loader. docs/data.md says which loaders are accepted.

        accumulate: this many batches form a step, which gets an iterator over them. The last step of an epoch may have fewer batches.
        begin_epoch: called with each epoch's number before that epoch, in place of the `set_epoch` of the loader and its sampler.
        """
        if total is None and epochs is None:
            raise UsageError("session.batches: say how long to train, as a number of steps or as epochs=")
        if any(getattr(source, "thing", None) is loader for source in self._sources.values()):
            raise UsageError("session.batches restores its loader by itself: do not give it to the Session as well")
        data = Batches(loader, epochs, accumulate, begin_epoch)
        self.fixed_data = False
        self._data = data
        if self._at is not None:
            data.keep(self._tape.alone.generators, self._at.rank, lambda known: is_within(known, self._given))
            self._course.data = self._tape.alone.data = data
            self._started.apart = data.loaders
            if self._handoff.resume_step < 0:
                sources = [source for source in self._sources.values() if isinstance(source, Optimizers)]
                inner = (optimizer for source in sources for _, _, optimizer in source.parts())
                self._ahead = ReadAhead(inner, self._tell)
        return self._steps(total, data)

    def _steps(self, total: int | None, data: Batches | None, start: int = 0) -> Iterator[tuple[int, Any]]:
        if self._counting:
            raise UsageError(
                "a Session counts the steps of one loop: call steps() or batches() once, with the total number of steps"
            )
        self._counting = True
        watched = self._at is not None
        if watched:
            self._started.notice()
            self._beside.begins(None if data is None or not self._looks else data.loaders)
            self._counts.look(self._tell)
            self._generators.look(sys._getframe())
            if self._looks:
                with suppress(Exception):  # whatever the script's variables are, the search must not harm the training
                    self._named = moved_on(sys._getframe(), [*self._given, data])
                if self._named:
                    self._tell(loop_variables.sentence(self._named))
        restored = self.restore()
        if self._at is not None:
            asked = {"steps": total, "epochs": None if data is None else data.epochs}
            total, epochs = length(self._at, self._course, asked).values()
            if data is not None:
                data.epochs = epochs
        self._step = restored if restored is not None else start
        if data is not None and restored:
            data.restored(self.data_step, same_job=self._handoff.resume_step >= 0)
        self._put_back(data)  # before `begin`, which may take the restored state as a snapshot
        step = self._step = self.begin(self._step, total)
        self._put_back(data)  # `begin` may have obeyed an order to rewind
        try:
            yield from self._computed(step, total, data)
        except GeneratorExit:
            self.leave()
            raise
        finally:
            if data is not None:
                data.end()
            if watched:  # the script may train further models in this process
                self._tape.close()
                self._accumulation.release()
                self._started.release()

    def _computed(self, step: int, total: int | None, data: Batches | None) -> Iterator[tuple[int, Any]]:
        crossed = False
        """Whether a boundary (the moment after a step) was passed since the ranks began or rewound."""
        while total is None or step < total:
            self._step, before = step, self._figures
            batch = None if data is None else self._take(data)
            if batch is not OVER:
                self._ahead.gives()
                if data is not None:
                    self._beside.gives()
                held, batch = [batch], None
                yield step, held.pop()  # the script alone holds the batch: it may free the memory within the step
                self._ahead.gave(reported=self._figures is not before)
                if data is not None:
                    data.drain()
                    self._beside.gave()
                step += 1
                last = step == total
                judgement = self.boundary(step, self._figures, judged_now=last, last=last)
                self._figures = Figures()
                self._look_for_changes(data)
            elif crossed:
                last, judgement = True, self.close(step)
            else:
                break
            crossed = True
            if judgement is Directive.REWIND:
                step, crossed = self.rewind(), False
                self._put_back(data)
            elif last:
                break
            elif judgement is Directive.LEAVE:
                return
        self.complete = True
        self.finish()

    @property
    def _looks(self) -> bool:
        """Whether this rank searches for state that no snapshot contains. Only rank 0 searches, at the job's first start."""
        return self._at is not None and self._at.rank == 0 and self._handoff.resume_step < 0

    def _look_for_changes(self, data: Batches | None) -> None:
        if self._looks:
            names: list[str] = []
            with suppress(Exception):
                names = self._changed.stepped(
                    sys._getframe(),
                    [*self._given, *self._missing, data],
                    self._named,
                    0 if data is None else data.epoch,
                )
            if names:
                say(changed_objects.sentence(names))

    def _take(self, data: Batches) -> Any:
        wanted = self.data_step
        if wanted > data.position:  # skipped batches are loaded too
            with self.pausing("checkpoint"):
                return data.take(wanted)
        return data.take(wanted)

    def _put_back(self, data: Batches | None) -> None:
        if data is not None and data.owed:
            before = self._sums()
            with self.pausing("checkpoint"), self.same_randomness():
                data.put_back()
            if before != self._sums():
                self._tell(_CHANGES_THE_MODEL)
        if self._at is not None:
            self._generators.put_back()
        self.resume()

    def _sums(self) -> list[str]:
        """Return the sum of each parameter of the models."""
        parameters = (each for model in self._models for chunk in model.chunks for each in chunk.parameters())
        with torch.no_grad():
            return [str(float(each)) for each in sums(map(local, parameters))]

    @property
    def epoch(self) -> int:
        """The epoch of the last batch that `batches` yielded, counted from 0."""
        return self._from().epoch

    @property
    def epoch_ends(self) -> bool:
        """Whether the present step is the last of its epoch. While this is true, evaluate, or step a schedule that counts epochs."""
        following = self._step + 1
        return self._from().ends(following if self._at is None else self._course.batch(following))

    def _from(self) -> Batches:
        if self._data is None:
            raise UsageError("a Session knows epochs only if the loop takes its batches from session.batches")
        return self._data

    @property
    def data_step(self) -> int:
        """The number of the batch for the present step, counted from 0: the step's own number, unless data was skipped before. If a loop
        fetches the batch with this number, a recovery can skip data that causes a spike."""
        if self.fixed_data and self._at is not None:
            self._page.tells = 2
        self.fixed_data = False
        return self._step if self._at is None else self._course.batch(self._step)

    @property
    def careful(self) -> bool:
        """Whether the present step belongs to a rescue (steps with a lower learning rate or a higher precision). A loop that chooses its
        own precision must then compute in a higher one (`rescue.precision`). The session lowers the learning rate."""
        return self._at is not None and self._rescue.asked

    def report(self, *, loss: Any = None, grad_norm: Any = None, skipped: bool = False) -> None:
        """Report the figures of the step just computed: floats or one-element tensors. Figures that are not reported are not judged. In any
        case, a snapshot whose parameters contain NaN or Inf is not kept."""
        self._figures = Figures(number(loss), number(grad_norm), skipped)
