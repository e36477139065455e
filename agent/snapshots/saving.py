"""Asks the ranks for snapshots on disk and in another node's memory. The agent asks for a snapshot on disk when the schedule, an operator,
or a shortage of memory requires it. The drain process reports the outcome."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...checkpoint.durable.save_interval import AUTO, SnapshotPolicy
from ...resilience.clock import monotonic_s
from ..buddy.buddy_client import Copies
from ..ranks.board import Board
from .drain_client import Draining
from .save_schedule import Pacing


class Saving:
    def __init__(self, board: Board, drain: Draining, copies: Copies | None, policy: SnapshotPolicy) -> None:
        """copies: copies in other nodes' memory; None if no other node can hold copies."""
        self._board, self._drain, self._copies = board, drain, copies
        self._schedule = Pacing(len(board.pages), monotonic_s()) if policy.durable_every_steps == AUTO else None
        """None if the user has set the interval in steps: then the ranks themselves follow it."""
        self.asked = ""
        """The last request for a snapshot on disk that was passed on to the ranks."""
        self.took_s = 0.0
        """Seconds that the last write of a snapshot to disk took."""

    def begin(self) -> None:
        """Prepare for new ranks, which are about to start."""
        if self._schedule and self._board.orders.generation:
            self._schedule.failures += 1
        self.asked = ""

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

    def pace(self, *, short: bool, first_of_several: bool) -> None:
        """Ask for the snapshots that are due. Call it only while all ranks train. short: memory runs out, so a snapshot on disk is due now.
        first_of_several: this node is the first of several, and asks for copies on behalf of all."""
        if short or (self._schedule and self._schedule.due(monotonic_s())):
            self._board.ask_durable()
        if self._copies and first_of_several and self._copies.due(monotonic_s()):
            self._board.ask_copy()

    def ask(self, request: str) -> None:
        """Ask for a snapshot on disk at the ranks' next step boundary."""
        self.asked = request
        self._board.ask_durable()
