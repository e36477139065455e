"""Gradients that several steps of the session add up before the optimizer takes them: no snapshot between such steps holds them.

Ordinary loops leave gradients as well, and set them to None or zero before the next pass. So one parameter's gradient is looked at again
where an optimizer steps. The same tensor, written to since a boundary that no optimizer has stepped before, was added to. A loss scaler
that leaves a step out may look the same once, and not twice in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

_IN_A_ROW = 2
SAID = (
    "This loop adds up gradients over several steps of the session. A snapshot between them does not hold the sum, so a recovery loses it. "
    "Make one step of them: session.batches(loader, accumulate=…), or a session.steps that counts the optimizer's steps"
)


class Accumulation:
    def __init__(self, models: Iterable[torch.nn.Module], tell: Callable[[str], Any]) -> None:
        self._models, self._tell = list(models), tell
        self._stepped = False
        """An optimizer has, since the last boundary."""
        self._left: tuple[torch.Tensor, torch.Tensor, int] | None = None
        """A parameter, the gradient that it had at the last boundary, and how often that had been written to."""
        self._seen = 0
        self._hook = register_optimizer_step_pre_hook(self._before)

    def crossed(self) -> None:
        """A boundary was."""
        self._left = None if self._stepped else self._some()
        self._stepped = False

    def _some(self) -> tuple[torch.Tensor, torch.Tensor, int] | None:
        parameters = (each for model in self._models for each in model.parameters() if each.grad is not None)
        found = next(parameters, None)
        return None if found is None or found.grad is None else (found, found.grad, found.grad._version)

    def _before(self, *_: Any) -> None:
        if self._stepped:
            return
        self._stepped = True
        left, self._left = self._left, None
        added = left is not None and left[0].grad is left[1] and left[1]._version > left[2]
        self._seen = self._seen + 1 if added else 0
        if self._seen == _IN_A_ROW:
            self._hook.remove()
            self._models = []
            self._tell(SAID)
