"""Something around `session.batches` that takes batches ahead of the training, as a prefetcher does. Each batch that is taken ends a step,
so the snapshots are of another batch than they say.

It cannot be told for certain from within. What shows is a first step without a gradient, before a step with one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import torch

_MOST = 2
"""So many steps without anything, at the beginning: batches that are read ahead."""
_SAID = (
    "The first step of this loop computed no gradient before the loop took the next batch. If something around session.batches reads ahead "
    "(a prefetcher), a recovery leaves batches out. Put it inside, as in session.batches(lambda: Prefetcher(loader), …), or leave reading "
    "ahead to the workers of the DataLoader (docs/data.md)"
)


class ReadAhead:
    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], say: Callable[[str], None]) -> None:
        """Without an optimizer nothing is said. To be made in the thread of the loop."""
        self._optimizers, self._say = list(optimizers), say
        self._thread = threading.get_ident()
        self._left = _MOST + 1 if self._optimizers else 0
        """Steps that are still looked at."""
        self._nodes = 0

    def gives(self) -> None:
        """Right before a batch is given to the loop."""
        if self._left:
            self._nodes = _nodes()

    def gave(self, reported: bool) -> None:
        """When the loop takes the next one. reported: it has reported figures meanwhile."""
        if not self._left:
            return
        first = self._left == _MOST + 1
        if reported or self._nodes != _nodes() or self._has_gradient():
            self._left = 0
            if not first:
                self._say(_SAID)
        elif threading.get_ident() != self._thread:
            self._left = 0
            self._say(_SAID)
        else:
            self._left -= 1

    def _has_gradient(self) -> bool:
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        return any(parameter.grad is not None for group in groups for parameter in group["params"])


def _nodes() -> int:
    """The number of the next node that this thread adds to a graph of gradients. A forward pass adds some, also where the optimizer leaves
    its step out, or the gradients are gone by now."""
    return torch.autograd._get_sequence_nr()
