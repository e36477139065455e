"""The state of the simulated training, and what a snapshot of it holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mt_resilient.checkpoint.arena.slot_header import Stamp

State = tuple[int, ...]
HURT = 1_000_000
"""Added to a sample by whose use the state was damaged."""


_MASK = 2**64 - 1


@dataclass(frozen=True)
class Inner:
    """What a step changes besides using a sample."""

    generator: int = 1
    momentum: int = 0

    def stepped(self, sample: int) -> Inner:
        drawn = (self.generator * 6364136223846793005 + 1442695040888963407) & _MASK
        return Inner(drawn, (self.momentum * 3935559000370003845 + (drawn >> 7) + sample) & _MASK)


@dataclass
class Kept:
    """A snapshot in the memory of a node, the same for all ranks but for those that are `odd` or `missing`."""

    state: State
    inner: Inner = Inner()
    bits: int = 0
    """What differs each time that a step is computed: the stack is not deterministic."""
    course: dict[str, Any] = field(default_factory=dict)
    missing: frozenset[int] = frozenset()
    """Ranks that could not take their copy."""
    sealed: bool = False
    durable: bool = False
    marked: bool = False
    """It is copied into another node's memory."""
    drained: bool = False
    drained_at_s: float = 0.0
    looked: int = 0
    """How often its first node has looked for the parts of the others."""
    stamp: Stamp = Stamp(0, 0, 0)
    seat: tuple[int, int] = (0, 1)
    """Node rank and number of nodes of the ranks whose state it is."""
    odd: frozenset[int] = frozenset()
    """Ranks whose copy is another one."""


@dataclass(frozen=True)
class Restored:
    """What ranks have gone on from."""

    generation: int
    step: int
    before: int
    """The step that the state had to be older than; -1: any would do."""
    kept: Kept
    in_place: bool
    others: tuple[Kept, ...] = ()
    """What the ranks of further nodes have."""
