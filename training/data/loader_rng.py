"""Repeats random numbers for loaders that can only be replayed, and for samplers that draw during the epoch, not only at its start.

A loader that can only be replayed may draw from the rank's generators in the middle of an epoch. For example, the shorter of two loaders
starts over, with a new order. The training draws from the same generators (dropout). So if the loader draws random numbers for a batch, the
generator's state before that batch is saved. The state is not saved if nothing else has drawn since the previous batch. When the loader is
replayed, it draws the same numbers.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..attach.rank_stderr import say
from ..state.rng import collect_host, restore_host
from ..state.tensors.in_place import Nested
from ..state.values.type_adapters import packed

MOST = 256
"""The most batches of an epoch for which generator states are saved. The states for one batch take some kB in each snapshot. A loader that
draws for every batch usually has no fixed order of samples."""


class Draws:
    """The saved generator states of one epoch."""

    def __init__(self, tells: bool = False, again: dict[int, Nested] | None = None) -> None:
        """`again`: the states that were saved when these batches were taken the first time."""
        self.kept: dict[int, Nested] = {}
        """The states of generators as bytes, by batch number and generator name."""
        self.again = again or {}
        self._after: Nested = {}
        self._tells = tells

    def following(self, again: dict[int, Nested] | None = None) -> Draws:
        """Return a new object for the next epoch, or for a replay of this epoch."""
        return Draws(self._tells, again)

    def watched(self, number: int, take: Callable[[], Any]) -> Any:
        """Return the result of `take`, which takes batch `number`, and save the states of generators from which `take` draws."""
        if known := self.again.get(number):
            restore_host(collect_host() | {name: _generator(name, state) for name, state in known.items()})
        before = _states()
        taken = take()
        after = _states()
        moved = {
            name: before[name] for name in before if number and before[name] not in (after[name], self._after.get(name))
        }
        self._after = after
        if moved and len(self.kept) < MOST:
            self.kept[number] = {name: _bytes(name, state) for name, state in moved.items()}
        elif moved and self._tells:
            self._tells = False
            say(
                "for each batch, this loader or its sampler draws from the random generators that the training also uses. A recovery "
                f"can repeat that for {MOST} batches of an epoch. After these batches, it continues with batches that differ from the "
                "original ones. Give the sampler, or the loader, a generator of its own"
            )
        return taken


def _states() -> dict[str, Any]:
    """Return the states of the rank's generators, in a form that is quick to compare, because they are compared twice for each batch."""
    told: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state().numpy().tobytes()}
    if "numpy" in sys.modules:
        state: Any = np.random.get_state()
        name, keys, *rest = state
        told["numpy"] = (name, keys.tobytes(), *rest)
    return told


def _bytes(name: str, state: Any) -> Any:
    if name != "python":
        return state
    version, words, gauss = packed(state)
    return version, words.tobytes(), gauss


def _generator(name: str, state: Any) -> Any:
    if name == "torch":
        return torch.frombuffer(bytearray(state), dtype=torch.uint8)
    first, words, *rest = state
    return (first, np.frombuffer(words, np.uint32), *rest)
