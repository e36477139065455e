"""Prints once in a job that a training loop is not known. A loop that is not known runs as under torchrun alone."""

from __future__ import annotations

import sys

from ...resilience.errors import StateError
from .attach import attach
from .rank_stderr import say

_said: set[int] = set()
"""Generations in which this process has printed that."""


class UnknownLoop(Exception):
    """A training loop lacks something that its hooks need."""


def tell_unknown(loop: str, why: BaseException | str) -> None:
    """Print that the loop is not known, only on rank 0 and only in the job's first generation. loop: the module that contains the loop.
    why: what the hooks did not find."""
    attached = attach(trains=False)
    if attached is None or attached.page.generation in _said:
        return
    _said.add(attached.page.generation)
    if isinstance(why, StateError):
        tell_once(f"{why}. The training loop of {loop} runs as under torchrun alone: unwatched and without snapshots")
        return
    if isinstance(why, BaseException) and not isinstance(why, UnknownLoop):
        why = f"{type(why).__name__}: {why}"
    tell_once(
        f"the training loop of {loop} is not known ({why}). It runs as under torchrun alone: unwatched and without snapshots. "
        "docs/launching.md lists the known loops. To have another loop watched, give it a Session (docs/session.md)"
    )


def tell_once(sentence: str) -> None:
    """Print the sentence, only on rank 0 and only in the job's first generation."""
    attached = attach(trains=False)
    if attached is not None and not attached.rank and attached.handoff.generation <= 1:
        say(sentence)


def name_of(namespace: dict[str, object]) -> str:
    """Return a name for the module with this namespace, for messages."""
    name = str(namespace.get("__name__", "this script"))
    return sys.argv[0] if name == "__main__" else name
