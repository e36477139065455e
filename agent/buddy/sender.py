"""Sends the newest complete marked snapshot to the buddy: arena (this node's slots in shared memory) → one connection, slot by slot. Ranks
mark the snapshots that are to be copied."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ...checkpoint.arena.arena import Slot
from ...checkpoint.arena.slot_header import Stamp
from ...checkpoint.buddy import admission
from ...checkpoint.buddy.connection import Connection, Lost, Refused, call
from ...checkpoint.buddy.protocol import Word
from ...checkpoint.buddy.transfer import give
from ...checkpoint.durable.save import holding
from ...resilience import clock
from .buddy_config import BACKOFF_S, BuddyConfig, Event, Tell, address_of


class _Overdue(Exception):
    """A copy took longer than `hold_s`, although the buddy answered."""


class Sending:
    """Copies the newest complete marked snapshot to the buddy, over one connection, until it is stopped."""

    def __init__(self, config: BuddyConfig, token: bytes, arena: Sequence[Sequence[str]], tell: Tell) -> None:
        self._config, self._token, self._tell = config, token, tell
        self._slots = [[Slot(path) for path in row] for row in arena]
        self.to = config.send_to
        """The buddy's host:port; another thread may change it."""
        self._last: Stamp | None = None
        """The newest snapshot that needs no more tries: it was copied, or refused for good."""
        self._wait_s = BACKOFF_S[0]
        self._lost = False
        self._away_s = 0.0
        """Monotonic time since when the buddy has not answered; 0: it answers."""
        self._why = ""
        """The last reported reason why copies do not arrive."""
        self._over = threading.Event()

    def run(self) -> None:
        to = self.to
        while not self._over.is_set():
            if to != self.to:  # the new buddy has no copy yet
                to, self._last, self._lost, self._away_s, self._wait_s = self.to, None, False, 0.0, BACKOFF_S[0]
            if not to:
                self._over.wait(self._config.poll_s)
                continue
            try:
                with call(address_of(to), self._token, self._config.stall_s) as connection:
                    if self._lost:
                        self._tell({"event": "buddy back"})
                    self._lost, self._away_s = False, 0.0
                    while to == self.to and not self._over.is_set():
                        if not self._copied_one(connection):
                            connection.idle(self._config.poll_s)
            except _Overdue:  # the next try continues with the ranks whose copy the buddy lacks
                self._over.wait(self._pause_s())
            except (Lost, Refused) as error:
                if to != self.to:
                    continue
                self._away_s = self._away_s or clock.monotonic_s()
                if not self._lost and clock.monotonic_s() - self._away_s >= self._config.patience_s:
                    self._tell({"event": "buddy lost", "reason": str(error)})
                    self._lost = True
                self._over.wait(self._pause_s())

    def _copied_one(self, connection: Connection) -> bool:
        """Copy the newest snapshot, if there is a new one. Return True if it was copied, or refused for good."""
        headers = [[slot.header() for slot in row] for row in self._slots]
        stamp = admission.newest(headers, len(self._slots), self._last)
        if stamp is None:
            return False
        started, moved = clock.monotonic_s(), 0
        with holding(self._slots, stamp) as held:
            try:
                for row, (slot, view) in enumerate(held or ()):
                    outcome = give(connection, row, len(self._slots), slot, view, started + self._config.hold_s)
                    moved += view.header.image.memory_bytes if outcome.word is Word.KEPT else 0
                    if not outcome.there:
                        break
            except Lost as error:
                limit_s = self._config.hold_s
                if clock.monotonic_s() < started + limit_s:
                    raise
                self._not_copied(stamp, f"it takes longer than copies.hold_s allows ({limit_s:g} s)", self._wait_s)
                raise _Overdue from error
        if not held or outcome.word is Word.VOID:
            return False
        if not outcome.there:
            again_s = self._wait_s if outcome.word is Word.LATER else None
            self._not_copied(stamp, outcome.why, again_s)
            if again_s:
                connection.idle(self._pause_s())
                return False
        self._last = stamp
        if outcome.there:
            self._wait_s, self._why = BACKOFF_S[0], ""
            took_s = round(clock.monotonic_s() - started, 3)
            named: Event = {"step": stamp.step, "generation": stamp.generation}
            self._tell({"event": "replicated", **named, "bytes": moved, "seconds": took_s})
        return True

    def _not_copied(self, stamp: Stamp, why: str, again_s: float | None) -> None:
        """Report why this snapshot was not copied, unless the last report gave the same reason."""
        if why != self._why:
            named: Event = {"step": stamp.step, "generation": stamp.generation}
            self._tell({"event": "not replicated", **named, "reason": why, "retry_in_s": again_s})
        self._why = why

    def _pause_s(self) -> float:
        """Return how many seconds to wait now. Until a copy succeeds, each wait is twice as long as the one before, up to a limit."""
        wait_s, self._wait_s = self._wait_s, min(2 * self._wait_s, BACKOFF_S[1])
        return wait_s

    def stop(self) -> None:
        self._over.set()
