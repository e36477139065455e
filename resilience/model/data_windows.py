"""Computes which batch of data a step uses when windows (ranges of batches) are skipped. Pure.

    batches   0 1 2 3 4 5 6 7 8 …      a window [3, 6) is skipped:
    steps     0 1 2 . . . 3 4 5 …      step 3 uses batch 6

The number of steps and the learning rate's schedule do not change: later steps only use later batches. A step's batch depends only on the
step and the windows. So each restart of the job that knows the windows uses the same batches, from whichever step it starts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import UsageError


@dataclass(frozen=True, order=True)
class Window:
    """The batches from `start` to `stop - 1`. Batches are counted from 0, as the script uses them when it skips none."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise UsageError(
                f"{self.start}:{self.stop} is no window of data: write FROM:TO, in batches, with FROM less than TO"
            )

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"

    @staticmethod
    def parse(text: str) -> Window:
        """Parse `FROM:TO`. Raises UsageError."""
        start, _, stop = text.partition(":")
        if not (start.isdecimal() and stop.isdecimal()):
            raise UsageError(f"{text!r} is no window of data: write FROM:TO, in batches")
        return Window(int(start), int(stop))


def merged(windows: Iterable[Window]) -> tuple[Window, ...]:
    """Return the same batches as sorted windows that neither overlap nor touch each other."""
    found: list[Window] = []
    for window in sorted(windows):
        if found and window.start <= found[-1].stop:
            found[-1] = Window(found[-1].start, max(found[-1].stop, window.stop))
        else:
            found.append(window)
    return tuple(found)


def batch(step: int, windows: Iterable[Window]) -> int:
    """Return the number of the batch that the next step uses after `step` finished steps."""
    at = step
    for window in merged(windows):
        if at < window.start:
            break
        at += window.stop - window.start
    return at


def jump(step: int, windows: Iterable[Window]) -> int:
    """Return how many batches are skipped between the batch of the last finished step and that of the next step. step: number of finished
    steps."""
    known = merged(windows)
    return batch(step, known) - (batch(step - 1, known) + 1 if step > 0 else 0)


def following(step: int, count: int, windows: Iterable[Window]) -> Window:
    """Return the window of the next `count` batches (1 or more) that are used after `step` finished steps. The window also covers batches
    between them that are already skipped."""
    known = merged(windows)
    return Window(batch(step, known), batch(step + count - 1, known) + 1)


def ahead(step: int, past: Iterable[Window], known: Iterable[Window]) -> tuple[Window, ...]:
    """Return the windows to skip when the ranks continue after `step` steps, from a state computed without the batches of `past`. The
    result is `past` and each window of `known` that lies after the data used so far."""
    past = merged(past)
    reached = batch(step, past) if step else 0
    return merged((*past, *(window for window in known if window.start >= reached - _left_out(reached, past))))


def _left_out(reached: int, windows: tuple[Window, ...]) -> int:
    """Return how many batches the window that ends at `reached` has; 0: no window ends there. With this number, `ahead` also keeps a window
    that starts where that window starts."""
    return next((window.stop - window.start for window in windows if window.stop == reached), 0)
