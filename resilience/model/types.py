"""Types that agents and their ranks share: node, rank, step, generation, a rank's phase, and orders."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import NewType

NodeId = NewType("NodeId", str)
Rank = NewType("Rank", int)
"""Global rank of a training process, 0 to world size - 1."""
Step = NewType("Step", int)
"""Number of optimizer steps done: the state *after* that many. Step 0 is the initial state."""
Generation = NewType("Generation", int)
"""One life of all ranks, counted from 1. Every order, page, slot and manifest carries its generation; an older one is refused."""


class RankPhase(IntEnum):
    """Where a rank is in its life, as the rank itself writes on the board. The values follow each other in this order."""

    ABSENT = 0
    ATTACHED = 1
    """The interpreter is up and has loaded our hook; imports and model construction follow."""
    RESTORING = 2
    TRAINING = 3
    FINISHED = 4
    """The loop reached its end; only the script's code after the loop is left."""
    STOPPED = 5
    """The rank left the loop at a boundary before its end, by order or by the script's own decision."""


class Doing(IntEnum):
    """What a rank does between two boundaries that may take longer than a step, as the rank itself writes on the board."""

    STEP = 0
    """The rank computes an ordinary step."""
    EVALUATION = 1
    CHECKPOINT = 2
    """The script writes a checkpoint of its own."""
    PAUSED = 3
    """The rank waits at a boundary because of a pause, and goes on writing heartbeats."""
    LEFT = 4
    """The rank has left its loop before the end, by a `break` or an exception. Only the script's own code follows."""


class Order(IntEnum):
    """What the agent asks of its ranks through the board. Ranks agree on it by MAX, so a larger value wins."""

    NONE = 0
    STOP = 1
    """Leave at the next boundary."""
    SNAPSHOT_AND_STOP = 2
    """Stage a snapshot for the disk at the next boundary, then leave."""


class OrderedBy(StrEnum):
    """Why ranks go back although they found nothing wrong themselves."""

    OPERATOR = "ordered"
    """An operator ordered it."""
    COMPARISON = "fingerprint_mismatch"
    """Replicas were compared and have diverged."""
