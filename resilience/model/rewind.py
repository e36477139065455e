"""Records of rewinds in place: what the ranks did about a wrong step, and what that shows about the fault's origin."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from .data_windows import Window, merged
from .types import Step


class Remedy(StrEnum):
    REPLAY = "replay"
    """Replay the same data from the newest state before the onset."""
    REPLAY_EARLIER = "replay earlier"
    """Replay the same data from an older state."""
    REWIND = "rewind"
    """Continue from the newest state before the onset. It is not known which data the script uses after this remedy."""
    REWIND_EARLIER = "rewind earlier"
    """Continue from an older state. It is not known which data the script uses after this remedy."""
    SKIP = "skip"
    """Skip a window of data."""
    RESCUE = "rescue"
    """Skip a window of data, and compute the steps around it with a lower learning rate or a higher precision (`rescue`)."""
    GIVE_UP = "give up"
    WAIT = "wait"
    """Train on: a loss that has gone up mostly comes back by itself."""
    LEAVE_ALONE = "leave alone"
    """Train on: the NaN is in the figures of one step only. Each replay gives the NaN again, and the state stays finite."""
    CONTINUE = "continue"
    """Go back to the newest state before the onset, and train on, however high the loss is, because no remedy has helped. Data that earlier
    rewinds to this state or a later one skipped because of the same kind of fault is used after all."""


class Origin(StrEnum):
    """Where a fault came from, as shown by the remedy that cured it."""

    UNKNOWN = ""
    TRANSIENT = "transient"
    """A replay from the same state was clean. The cause may be hardware, a race, or a random draw that no snapshot holds."""
    STATE = "state"
    """A replay from an older state was clean: the newer state in memory may have been damaged."""
    DATA = "data"
    """Each replay of the data had the fault, and skipping the data cured it."""
    UNDECIDED = "undecided"
    """The fault is gone, but the ranks may have used other data."""
    RESCUED = "rescued"
    """Skipping data did not cure the fault. Skipping more, and computing the steps around it with care (`RESCUE`), cured it."""


SKIPS = (Remedy.SKIP, Remedy.RESCUE)
"""Remedies that skip data."""

REPLAYS = (Remedy.REPLAY, Remedy.REPLAY_EARLIER)
"""Remedies after which the ranks use the same data again."""

BLIND = (Remedy.REWIND, Remedy.REWIND_EARLIER)
"""Remedies after which it is not known which data the ranks use."""

EARLIER = (Remedy.REPLAY_EARLIER, Remedy.REWIND_EARLIER)
"""Remedies that rewind to an older state than the newest one before the onset."""

AGAIN = "again"
"""Stands in place of an `Origin` if the remedy did not cure the fault."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One rewind in place that the ranks did."""

    kind: str
    """The reason: a `Kind` of fault that the ranks found, or an `OrderedBy`."""
    onset: Step
    to: Step
    remedy: Remedy
    window: Window | None = None


def left_out(turns: Iterable[Turn]) -> tuple[Window, ...]:
    """Return the data that remains skipped after these rewinds."""
    skips: list[Turn] = []
    for turn in turns:
        if turn.remedy is Remedy.CONTINUE:
            skips = [skip for skip in skips if skip.kind != turn.kind or skip.to < turn.to]
        elif turn.window:
            skips.append(turn)
    return merged(skip.window for skip in skips if skip.window)
