"""How many hold on to a tensor that only one container has, while it is packed: found out by packing one, for versions of Python differ."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from .loans import Held, Lenders, Loans
from .packing import Packing


class _Asking(Packing):
    def __init__(self) -> None:
        super().__init__("", {})
        self._loans = Loans(Lenders())
        self.found: list[Held] = []

    def _loan(self, value: Any, lies_in: int, held: Held) -> None:
        self.found.append(held)


@cache
def alone() -> Held:
    asking = _Asking()
    asking.pack([torch.zeros(1)])
    asking.pack({"": torch.zeros(1)})
    return min(asking.found)
