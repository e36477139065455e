"""Checks whether only the agent and our hook in the rank can have written a rank's page (its block of shared memory). Pure.

A script that writes beyond the end of an array, or to a file descriptor of ours, may have overwritten the page. A reader trusts a page only
if no value on it is impossible.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..model.cause import Kind
from ..model.signals import Repeated
from ..model.types import Doing, RankPhase
from .board_events import REWINDS, SIGHTINGS, Noted, Rewound, Sighted
from .board_layout import MARKS, Page

MOST = 1 << 48
"""No training has this many steps or snapshots."""
MOST_NS = 1 << 62
MOST_PIDS = 1 << 22
"""Linux's own limit of process ids on 64 bits."""
RANKS = 1 << 20

_BOUNDS: dict[str, tuple[int, int]] = {
    "pid": (0, MOST_PIDS),
    "rank": (-1, RANKS),
    "phase": (0, max(RankPhase)),
    "doing": (0, max(Doing)),
    "step": (-1, MOST),
    "first_step": (-1, MOST),
    "total": (0, MOST),
    "durable_step": (-1, MOST),
    "snapshots": (0, MOST),
    "skipped": (0, MOST),
    "starved": (0, MOST),
    "rewinds": (0, MOST),
    "sightings": (0, MOST),
    "declined": (0, MOST),
    "left": (0, 1),
    "repeated": (0, max(Repeated)),
    "tells": (0, 3),
    "listens": (0, 64),
    "launched_pid": (0, MOST_PIDS),
    "seen": (0, 2000),
    "launcher_signal": (0, 64),
    **dict.fromkeys(("device_queued", "device_called"), (0, MARKS - 1)),
    **dict.fromkeys(
        (
            "beat_ns",
            "attached_ns",
            "built_ns",
            "restored_ns",
            "stepped_ns",
            "replayed_ns",
            "stall_ns",
            "device_since_ns",
        ),
        (0, MOST_NS),
    ),
}
"""For each field that ranks write: the least and the greatest possible value. What a device writes (`device_reached`, `device_answered`) is
not listed: it is only compared with other numbers, and is no reason to end the rank."""


@dataclass(frozen=True, kw_only=True)
class Orders:
    """The values that the agent last wrote on a page."""

    generation: int = 0
    order: int = 0
    durable: int = 0
    copies: int = 0
    paused: int = 0
    ordered: int = 0
    ordered_to: int = 0
    ordered_skip: int = 0
    ordered_by: int = 0
    fetching: int = 0
    until_ns: int = 0


_ORDERS = {name: Page.place(name) for name in Orders.__dataclass_fields__}
_PLACED = [(name, Page.place(name), *bounds) for name, bounds in _BOUNDS.items()]


def nonsense(page: Page, orders: Orders, pid: int = 0) -> str:
    """Return the first impossible value on the page, in words; empty: there is none. orders: the values that the agent last wrote there;
    pid: the process that claimed the page, 0: no process did."""
    return next(_nonsense(page, orders, pid), "")


def _nonsense(page: Page, orders: Orders, pid: int) -> Iterator[str]:
    numbers = page.ints.tolist()
    for name, place in _ORDERS.items():
        if numbers[place] != getattr(orders, name):
            yield f"{name} {numbers[place]}, where the agent had written {getattr(orders, name)}"
    for name, place, least, most in _PLACED:
        if not least <= numbers[place] <= most:
            yield f"{name} {numbers[place]}"
    if pid and page.pid != pid:
        yield f"pid {page.pid}, where {pid} stood"
    if not all(0 <= spent <= MOST_NS for spent in page.spent):
        yield f"times of its steps {page.spent}"
    for what, ring, told in (("rewind", REWINDS, page.rewinds), ("finding", SIGHTINGS, page.sightings)):
        # Not the oldest record: the rank may be overwriting it with the next one right now.
        for ordinal in range(max(1, told - ring.kept + 2), told + 1):
            try:
                found: Noted = ring.get(page.raw, ordinal)
            except (IndexError, ValueError) as error:
                yield f"{what} {ordinal} ({error})"
            else:
                yield from (f"{what} {ordinal}: {word}" for word in _noted(found))


def _noted(found: Noted) -> Iterator[str]:
    steps = {"onset": found.onset, "to": found.to}
    if isinstance(found, Rewound):
        steps |= {"reached": found.reached, "order": found.order}
        if not 0 <= found.done_ns <= MOST_NS:
            yield f"done_ns {found.done_ns}"
    if isinstance(found, Sighted):
        if found.kind not in tuple(Kind):
            yield f"kind {found.kind}"
        steps |= {"seen": found.seen, "last": found.last}
    for name, step in steps.items():
        if not -1 <= step <= MOST:
            yield f"{name} {step}"
    if not 0 <= found.at_ns <= MOST_NS:
        yield f"at_ns {found.at_ns}"
    if found.window and found.window.stop > MOST:
        yield f"window {found.window}"
