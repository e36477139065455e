"""The words that agents and their ranks share: who, which step, what a rank is at, what is asked of it."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import NewType

NodeId = NewType("NodeId", str)
Rank = NewType("Rank", int)
"""Global rank of a training process, 0 to world size - 1."""
Step = NewType("Step", int)
"""Number of optimizer steps done: the state *after* that many. Step 0 is the initial state."""
Generation = NewType("Generation", int)
"""One life of the worker group, counted from 1. It fences every order, page, slot and manifest: what carries an older one is refused."""


class RankPhase(IntEnum):
    """Where a rank is in its life, as it says itself on the board. The order is the order of a life."""

    ABSENT = 0
    ATTACHED = 1
    """The interpreter is up and our hook is in it; imports and model construction follow."""
    RESTORING = 2
    TRAINING = 3
    FINISHED = 4
    """The loop reached its end; only the script's own tail is left."""
    STOPPED = 5
    """Left the loop at a boundary before its end: ordered to, or by the script's own will."""


class Doing(IntEnum):
    """What a rank does between two boundaries that may take longer than a step, as it says itself on the board."""

    STEP = 0
    """Nothing of the kind."""
    EVALUATION = 1
    CHECKPOINT = 2
    """The script writes a checkpoint of its own."""
    PAUSED = 3
    """It waits at a boundary, since a pause is ordered, and beats meanwhile."""
    LEFT = 4
    """It has left its loop before the end, by a `break` or by what it raised: what comes is the script's own."""


class Order(IntEnum):
    """What the agent asks of its ranks through the board. Ranks agree on it by MAX, so a larger value wins."""

    NONE = 0
    STOP = 1
    """Leave at the next boundary."""
    SNAPSHOT_AND_STOP = 2
    """Stage a durable snapshot at the next boundary, then leave."""


class OrderedBy(StrEnum):
    """Why ranks go back that have found nothing wrong themselves."""

    OPERATOR = "ordered"
    """Somebody wants it."""
    COMPARISON = "fingerprint_mismatch"
    """Replicas have gone apart."""
