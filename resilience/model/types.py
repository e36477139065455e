"""Types that agents and their ranks share: node, rank, step, generation, a rank's phase, and orders."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import NewType

NodeId = NewType("NodeId", str)
Rank = NewType("Rank", int)
"""Global rank of a training process, 0 to world size - 1."""
Step = NewType("Step", int)
"""Number of finished optimizer steps, and the state *after* them. Step 0 is the initial state."""
Generation = NewType("Generation", int)
"""Number of one life of all ranks (from their start to their end), from 1. Every order, page, slot and manifest carries it, and an older
number is refused."""


class RankPhase(IntEnum):
    """The phase of a rank between its start and its end. The rank writes it on the board (memory that it shares with its agent). The phases
    follow each other in this sequence."""

    ABSENT = 0
    ATTACHED = 1
    """The interpreter is up and has loaded our hook; imports and model construction follow."""
    RESTORING = 2
    TRAINING = 3
    FINISHED = 4
    """The loop reached its end; only the script's code after the loop remains."""
    STOPPED = 5
    """The rank left the loop between two steps before the loop's end, by order or by the script's own decision."""


class Doing(IntEnum):
    """What a rank does between two boundaries (moments between two steps). The rank writes it on the board. Values other than STEP may take
    longer than a step."""

    STEP = 0
    """The rank computes an ordinary step."""
    EVALUATION = 1
    CHECKPOINT = 2
    """The script writes a checkpoint of its own."""
    PAUSED = 3
    """The rank waits at a boundary because of a pause, and still writes heartbeats."""
    LEFT = 4
    """The rank has left its loop before the end, by a `break` or an exception. Only the script's own code follows."""


class Order(IntEnum):
    """What the agent orders its ranks to do, through the board. The ranks reduce their orders by MAX, so a larger value wins."""

    NONE = 0
    STOP = 1
    """Leave the loop at the next boundary."""
    SNAPSHOT_AND_STOP = 2
    """Stage a snapshot for the disk at the next boundary, then leave the loop."""


class OrderedBy(StrEnum):
    """Why ranks rewind although they found nothing wrong themselves."""

    OPERATOR = "ordered"
    """An operator ordered the rewind."""
    COMPARISON = "fingerprint_mismatch"
    """A comparison showed that replicas have diverged."""
