"""Asks the ranks for snapshots on disk and in another node's memory. The schedule, an operator or scarce memory wants one on disk. The
drain process reports what has become of them."""

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
        """copies: None if no other node can hold them."""
        self._board, self._drain, self._copies = board, drain, copies
        self._schedule = Pacing(len(board.pages), monotonic_s()) if policy.durable_every_steps == AUTO else None
        """None if the user has fixed the interval in steps: then the ranks keep it."""
        self.asked = ""
        """The last request for a snapshot on disk that the ranks were told of."""
        self.took_s = 0.0
        """Seconds that the last snapshot on disk took."""

    def begin(self) -> None:
        """Prepare for new ranks, which are about to start."""
        if self._schedule and self._board.orders.generation:
            self._schedule.failures += 1
        self.asked = ""

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the drain process's events; start it if it does not run."""
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
        """Ask for the snapshots that are due, while all ranks train. short: memory runs out, so a snapshot on disk is wanted now.
        first_of_several: this node asks for copies, on behalf of all."""
        if short or (self._schedule and self._schedule.due(monotonic_s())):
            self._board.ask_durable()
        if self._copies and first_of_several and self._copies.due(monotonic_s()):
            self._board.ask_copy()

    def ask(self, request: str) -> None:
        """Ask for a snapshot on disk, as soon as the ranks come to a boundary."""
        self.asked = request
        self._board.ask_durable()
