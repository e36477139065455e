"""Marks recoveries in the logs that the script itself keeps with TensorBoard or Weights & Biases. This module imports neither library, and
does nothing in a process in which the script has opened no such log."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from ..live_instances import live_instances
from .rank_stderr import say

AGAIN, WORDS = "mt_resilient/steps_again", "mt_resilient/recovery"
"""The names of the scalar, and of TensorBoard's text."""


_due: list[tuple[str, int, int]] = []


def due(what: str, reached: int, resumed: int) -> None:
    """Note a mark for `leave` to write. what: what the ranks did. reached: the step at which they went back. resumed: the step to which
    they went back."""
    _due.append((what, reached, resumed))


def leave() -> None:
    """Call this at each boundary: it writes the marks that are due. If the script opens a new log after a rewind, it has done so by then,
    and TensorBoard's `purge_step` does not hide the marks."""
    while _due:
        _mark(*_due.pop(0))


def _mark(what: str, reached: int, resumed: int) -> None:
    try:
        for writer in _writers():
            writer.add_scalar(AGAIN, reached - resumed, reached)
            writer.add_text(WORDS, f"{what}: from step {reached} back to step {resumed}", reached)
        run = getattr(sys.modules.get("wandb"), "run", None)
        if run is not None:  # with commit=False, the script's count of rows does not change
            run.log({AGAIN: reached - resumed}, commit=False)
    except Exception as error:  # a library's failure must not become a fault of the training
        say(
            f"the recovery could not be marked in the script's own log ({type(error).__name__}: {error}); training continues"
        )


def _writers() -> Iterator[Any]:
    """Yield TensorBoard's writers that are open in this process."""
    kind = getattr(sys.modules.get("torch.utils.tensorboard.writer"), "SummaryWriter", None)
    writers = live_instances(kind) if isinstance(kind, type) else []
    return (each for each in writers if getattr(each, "file_writer", None) is not None)
