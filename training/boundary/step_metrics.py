"""The figures of one step, as this rank knows them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Figures:
    """The figures of a step. None: this rank does not know the figure (for example the loss, on all but the last pipeline stage)."""

    loss: float | None = None
    grad_norm: float | None = None
    skipped: bool = False
    """The optimizer itself skipped the step (a loss scaler that found an overflow), so its figures are not judged."""

    @property
    def finite(self) -> bool:
        return self.skipped or all(value is None or math.isfinite(value) for value in (self.loss, self.grad_norm))


def number(value: Any) -> float | None:
    """Return the number in a float or a one-element tensor."""
    return None if value is None else float(value.detach() if torch.is_tensor(value) else value)


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
