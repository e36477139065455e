"""Rewinds in place as they are recorded: what the ranks did about a wrong step, and what that tells of its origin."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .data_windows import Window
from .types import Step


class Remedy(StrEnum):
    REPLAY = "replay"
    """The same data from the newest state before the onset."""
    REPLAY_EARLIER = "replay earlier"
    """The same data from an older state."""
    REWIND = "rewind"
    """From the newest state before the onset; which data comes then is not known."""
    REWIND_EARLIER = "rewind earlier"
    """The same from an older state."""
    SKIP = "skip"
    """A window of data is left out."""
    RESCUE = "rescue"
    """The same, and the steps around it are computed with care (`rescue`)."""
    GIVE_UP = "give up"


class Origin(StrEnum):
    """Where a fault came from, as the remedy that cured it tells."""

    UNKNOWN = ""
    TRANSIENT = "transient"
    """Gone when the same data met the same state again: the hardware, perhaps, or a race, or a draw that no snapshot has."""
    STATE = "state"
    """Gone when the same data met an older state: what was in memory may have been damaged since."""
    DATA = "data"
    """It came again however often the data was replayed, and went with the data."""
    UNDECIDED = "undecided"
    """Gone, but the data may have been other data."""
    RESCUED = "rescued"
    """It came again when data was left out, and went where more was and the steps around it were computed with care."""


SKIPS = (Remedy.SKIP, Remedy.RESCUE)
"""Remedies that leave data out."""

REPLAYS = (Remedy.REPLAY, Remedy.REPLAY_EARLIER)
"""Those after which the same data comes again."""

BLIND = (Remedy.REWIND, Remedy.REWIND_EARLIER)
"""Those that do not know which data comes then."""

EARLIER = (Remedy.REPLAY_EARLIER, Remedy.REWIND_EARLIER)
"""Those that go back to an older state than the newest one."""

AGAIN = "again"
"""What became of a fault that one remedy did not cure."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One rewind that was done."""

    kind: str
    """A `Kind`, which the ranks have found, or an `OrderedBy`."""
    onset: Step
    to: Step
    remedy: Remedy
    window: Window | None = None
