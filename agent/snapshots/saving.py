"""Asks the ranks for snapshots on disk and in another node's memory. The agent asks for a snapshot on disk when the schedule, an operator,
or a shortage of memory requires it. The drain process reports the outcome."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ...checkpoint.durable.save_interval import AUTO, SnapshotPolicy, durable_interval_s
from ...resilience.clock import monotonic_s
from ...resilience.inprocess.loss_level import Outcome
from ...resilience.model.rewind import Remedy
from ...resilience.model.signals import Sighting
from ..buddy.buddy_client import Copies
from ..ranks.board import Board
from .drain_client import Draining


class Saving:
    def __init__(self, board: Board, drain: Draining, copies: Copies | None, policy: SnapshotPolicy) -> None:
        """copies: copies in other nodes' memory; None if no other node can hold copies."""
        self._board, self._drain, self._copies = board, drain, copies
        self._schedule = Pacing(len(board.pages), monotonic_s()) if policy.durable_every_steps == AUTO else None
        """None if the user has set the interval in steps: then the ranks themselves follow it."""
        self.asked = ""
        """The last request for a snapshot on disk that was passed on to the ranks."""
        self._resumed = self._watched = -1
        self._protected: list[str] = []
        self.took_s = 0.0
        """Seconds that the last write of a snapshot to disk took."""

    def begin(self) -> None:
        """Prepare for new ranks, which are about to start."""
        if self._schedule and self._board.orders.generation:
            self._schedule.failures += 1
        self.asked = ""

    def resumed(self, step: int, durable: Iterable[tuple[int, str]]) -> None:
        """Keep the snapshot of `step`, from which the ranks start now, until the next start: newer ones may turn out bad, or fail. durable:
        steps and names of the snapshots on disk."""
        self._resumed = step
        self._protect(durable)

    def watched(self, found: Iterable[Sighting], durable: Iterable[tuple[int, str]]) -> None:
        """Keep the snapshot from before a spike until the loss is back, or the ranks no longer wait for it."""
        for each in found:
            if each.remedy == Remedy.WAIT:
                self._watched = -1 if each.outcome in (Outcome.BACK, Outcome.STAYS) else each.to
        self._protect(durable)

    def _protect(self, durable: Iterable[tuple[int, str]]) -> None:
        names = [name for step, name in durable if step in (self._resumed, self._watched)]
        if names != self._protected:
            self._protected = names
            self._drain.protect(names)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the drain process's events. Start the process if it does not run."""
        self._drain.keep_running(monotonic_s())
        for event in self._drain.events(monotonic_s()):
            if self._copies:
                self._copies.heard(event)
                self._board.fetching(self._copies.fetching is not None)
            if event["event"] == "durable":
                self.took_s = event["seconds"]
                if self._schedule:
                    self._schedule.saved(event["seconds"])
            yield event

    def pace(self, seat: tuple[int, ...], *, short: bool) -> None:
        """Ask for the snapshots that are due. Call `pace` only while all ranks train. seat: this node's rank and the number of nodes. The
        first node asks on behalf of all: its drain process commits, so only its agent knows how long a snapshot takes. short: memory runs
        out on this node, so a snapshot on disk is due now."""
        first, several = seat[0] == 0, seat[1] > 1
        if short or (first and self._schedule and self._schedule.due(monotonic_s())):
            self._board.ask_durable()
        if self._copies and first and several and self._copies.due(monotonic_s()):
            self._board.ask_copy()

    def ask(self, request: str) -> None:
        """Ask for a snapshot on disk at the ranks' next step boundary."""
        self.asked = request
        self._board.ask_durable()


FIRST_S = 60.0
"""Seconds from the start to the first snapshot on disk. Later intervals follow from the write time and the failure rate."""


class Pacing:
    def __init__(self, devices: int, now_s: float) -> None:
        """devices: number of devices that can fail. now_s: monotonic."""
        self._devices = devices
        self._started_s, self._next_s = now_s, now_s + FIRST_S
        self._save_s = 0.0
        self.failures = 0

    def saved(self, took_s: float) -> None:
        """Record that a snapshot took `took_s` seconds to write."""
        self._save_s = took_s

    def due(self, now_s: float) -> bool:
        """Return whether a snapshot is due; if so, set the time of the next one."""
        if now_s < self._next_s:
            return False
        interval_s = durable_interval_s(self._save_s, self._devices, self.failures, now_s - self._started_s)
        self._next_s = now_s + (interval_s if self._save_s else FIRST_S)
        return True
