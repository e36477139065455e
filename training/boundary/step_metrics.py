"""The figures of one step, as this rank knows them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Figures:
    """The figures of a step. None: this rank does not know the figure (for example the loss, on all but the last pipeline stage)."""

    loss: float | None = None
    grad_norm: float | None = None
    skipped: bool = False
    """The optimizer itself skipped the step (a loss scaler that found an overflow), so its figures are not judged."""
    began: int = 0
    """The first step whose NaN or Inf may still be in a gradient; 0: none."""

    @property
    def finite(self) -> bool:
        return self.skipped or all(value is None or math.isfinite(value) for value in (self.loss, self.grad_norm))


_MOST_SKIPPED = 64
"""Number of steps in a row that a loss scaler may skip. The scaler halves its scale at each skipped step, usually from 2^16. Also the
number of steps after which no gradient of a skipped step is left."""


class Skips:
    """Steps with NaN or Inf that a loss scaler, or the script, skipped by itself: an optimizer did not step, so they did no harm. A loop
    that accumulates gradients may use these gradients later. If NaN or Inf follows then, the fault began at the first such step."""

    def __init__(self) -> None:
        self._last = self._began = self._count = 0
        self._used = False
        """Whether an optimizer has stepped since the last such step."""

    def look(self, step: int, figures: Figures, stepped: bool, held_back: Callable[[], bool]) -> Figures:
        """Return the figures to judge. stepped: an optimizer has stepped; held_back: returns whether an optimizer changed nothing."""
        if step <= self._last:  # the ranks have gone back
            self._began = self._count = 0
        self._last = step
        if (figures.finite and self._used) or step - self._began > _MOST_SKIPPED:
            self._began = 0
        if figures.finite:
            self._used, self._count = self._used or stepped, 0
            return replace(figures, began=self._began) if self._began else figures
        self._began, self._used, self._count = self._began or step, False, self._count + 1
        return replace(figures, began=self._began, skipped=self._count <= _MOST_SKIPPED and held_back())


def number(value: Any) -> float | None:
    """Return the number in a float or a one-element tensor."""
    return None if value is None else float(value.detach() if torch.is_tensor(value) else value)


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
