"""The random numbers that a loader gets, where it can only be gone through again.

Such a loader may draw from the rank's generators in the midst of an epoch: a shorter loader beside another begins anew, in another order.
The training draws from them, too (dropout). So each generator is kept as it was before a batch that the loader drew for, where others
had drawn since the batch before; and when the loader is gone through again, it draws the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..attach.rank_stderr import say
from ..state.rng import collect_host, restore_host
from ..state.tensors.in_place import Nested

MOST = 64
"""Batches of an epoch with such generators: some kB each, in each snapshot. What draws for all batches keeps no order, as a rule."""


class Draws:
    """Of one epoch."""

    def __init__(self, tells: bool = False) -> None:
        self.kept: dict[int, Nested] = {}
        """By batch: generators, by their names, as bytes."""
        self._after: Nested = {}
        self._tells = tells

    def following(self) -> Draws:
        """Those of the next epoch, or of this one again."""
        return Draws(self._tells)

    def watched(self, number: int, take: Callable[[], Any], again: dict[int, Nested]) -> Any:
        """What `take` gives, as batch `number`. again: what was kept when it was taken before."""
        if number in again:
            restore_host(collect_host() | {name: _generator(name, state) for name, state in again[number].items()})
        before = _states()
        taken = take()
        after = _states()
        moved = {
            name: before[name] for name in before if number and before[name] not in (after[name], self._after.get(name))
        }
        self._after = after
        if moved and len(self.kept) < MOST:
            self.kept[number] = moved
        elif moved and self._tells:
            self._tells = False
            say(
                "this loader and the training draw from the same random generators, the loader for each batch. "
                "A recovery replays the loader with other numbers. A batch that depends on an earlier draw then differs. "
                "Give session.batches the DataLoader itself, or give the loader a generator of its own"
            )
        return taken


def _states() -> Nested:
    host = collect_host()
    version, words, gauss = host["python"]
    told: Nested = {"python": (version, words.tobytes(), gauss), "torch": host["torch"].numpy().tobytes()}
    if "numpy" in host:
        name, keys, *rest = host["numpy"]
        told["numpy"] = (name, keys.tobytes(), *rest)
    return told


def _generator(name: str, state: Any) -> Any:
    if name == "torch":
        return torch.frombuffer(bytearray(state), dtype=torch.uint8)
    first, words, *rest = state
    return (first, np.frombuffer(words, np.uint32), *rest)
