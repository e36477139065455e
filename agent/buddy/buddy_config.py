"""What the drain process is told of the buddy tier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from ...checkpoint.buddy.connection import Address
from ...resilience.errors import UsageError

Event = dict[str, object]
Tell = Callable[[Event], None]
BACKOFF_S = (0.1, 10.0)
"""Before the buddy is called again, doubled after each further failure; and before a port that is taken is tried again."""
STOP_S = 1.0


@dataclass(frozen=True, kw_only=True)
class BuddyConfig:
    listen: str = ""
    """host:port where copies are taken and given; empty: nowhere."""
    send_to: str = ""
    """host:port of the buddy's drain process; empty: none, until it is named (`Buddy.send_to`)."""
    guests: tuple[tuple[str, ...], ...] = ()
    """Paths of the slots for copies, two per local rank of the node whose buddy this one is."""
    poll_s: float = 0.05
    """Between looks at the headers."""
    stall_s: float = 10.0
    """When nothing moves for so long, the other end counts as lost. Taking memory for the first copy counts too: about 1 s per 3 GB."""
    patience_s: float = 0.0
    """How long the buddy may be away until that is told: it may be about to start, or the job about to go on without its node."""
    hold_s: float = 60.0
    """How long the slots of one snapshot may be held while they are copied, so longer than that takes: a rank that finds no slot to
    overwrite meanwhile skips a snapshot."""

    def __post_init__(self) -> None:
        for name in ("listen", "send_to"):
            host, _, port = getattr(self, name).rpartition(":")
            if getattr(self, name) and not (host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
                raise UsageError(f"buddy: {name} has to be host:port, and is {getattr(self, name)!r}")
        if bool(self.listen) != bool(self.guests) or any(len(row) < 2 for row in self.guests):
            raise UsageError("buddy: whoever listens has two guest slots or more per rank, and nobody else has any")
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
