"""The session: ten lines in a training loop of one's own, and it can be rewound.

    session = Session(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in session.steps(1000):
        loss, grad_norm = train_step(step)
        session.report(loss=loss, grad_norm=grad_norm)

Outside of `mt-resilient run` a session is inert and the loop runs as if it were not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..resilience.boundary import Directive
from ..resilience.errors import UsageError
from .boundaries import Boundaries
from .figures import Figures, number


class Session(Boundaries):
    """A loop of one's own under the agent's eye. `sources` by name: see `state.source_of` for what can be one."""

    def __init__(self, **sources: Any) -> None:
        super().__init__(**sources)
        self._figures = Figures()
        self._step = 0
        self._counting = False

    def steps(self, total: int, start: int = 0) -> Iterator[int]:
        """Indexes of the steps still to be computed, 0-based; after a rewind they start again from the restored step. start: steps that a
        checkpoint of the script's own has brought; a snapshot, where there is one, replaces what that has loaded.

        The last step is judged before the iterator ends, so the loop never ends on a state that was not.
        """
        if self._counting:
            raise UsageError(
                "a Session counts the steps of one loop: call steps() once, and give it the whole number of them"
            )
        self._counting = True
        restored = self.restore()
        step = self.begin(restored if restored is not None else start)
        self.resume()
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
        if self.fixed_data and self._at is not None:
            self._page.tells = 2
        self.fixed_data = False
        return self._step if self._at is None else self._course.batch(self._step)

    @property
    def careful(self) -> bool:
        """Whether the present step is one of a rescue: for a loop that chooses by itself what precision it computes in, and is to choose a
        higher one then (`rescue.precision`). The learning rate is lowered by the session."""
        return self._at is not None and self._rescue.asked

    def report(self, *, loss: Any = None, grad_norm: Any = None, skipped: bool = False) -> None:
        """The figures of the step just computed: floats or one-element tensors. What is not reported is not judged, but no snapshot
        is kept whose parameters hold NaN or Inf."""
        self._figures = Figures(number(loss), number(grad_norm), skipped)
