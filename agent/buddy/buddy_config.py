"""The drain process's configuration for copies of snapshots. The buddy is the node that holds this node's copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from ...checkpoint.buddy.connection import Address
from ...resilience.errors import UsageError

Event = dict[str, object]
Tell = Callable[[Event], None]
BACKOFF_S = (0.1, 10.0)
"""First and longest wait, in seconds, before the next try to reach the buddy, or to listen on a port in use. Each failure doubles the
wait."""
STOP_S = 1.0


@dataclass(frozen=True, kw_only=True)
class BuddyConfig:
    listen: str = ""
    """host:port at which this node receives and serves copies. Empty: it does neither."""
    send_to: str = ""
    """host:port of the buddy's drain process. Empty: there is none until `Buddy.send_to` names it."""
    guests: tuple[tuple[str, ...], ...] = ()
    """Paths of the guest slots: two for each local rank of the node whose copies this node holds."""
    poll_s: float = 0.05
    """Seconds between two polls of the slot headers."""
    stall_s: float = 10.0
    """If no byte moves for this many seconds, the other end counts as lost. The time includes the allocation of memory for the first copy:
    about 1 s per 3 GB."""
    patience_s: float = 0.0
    """Seconds that the buddy may be unreachable before this is reported. The buddy may still be starting, or the job may soon continue
    without the buddy's node."""
    hold_s: float = 60.0
    """Seconds that a snapshot's slots may stay locked while they are copied. The limit must exceed the duration of a copy. A rank that
    finds no free slot meanwhile skips a snapshot."""

    def __post_init__(self) -> None:
        for name in ("listen", "send_to"):
            host, _, port = getattr(self, name).rpartition(":")
            if getattr(self, name) and not (host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
                raise UsageError(f"buddy: {name} has to be host:port, and is {getattr(self, name)!r}")
        if bool(self.listen) != bool(self.guests) or any(len(row) < 2 for row in self.guests):
            raise UsageError("buddy: listen needs two guest slots or more per rank, and guest slots need listen")
        if min(self.poll_s, self.stall_s, self.hold_s) <= 0:
            raise UsageError("buddy: poll_s, stall_s and hold_s have to be positive")

    @classmethod
    def from_object(cls, found: dict[str, object]) -> BuddyConfig:
        if unknown := found.keys() - {field.name for field in fields(cls)}:
            raise UsageError(f"buddy: there is no configuration key {', '.join(sorted(unknown))}")
        return cls(**found)  # type: ignore[arg-type]


def address_of(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return host, int(port)
