"""The agent's side of the board: it owns the shared memory, reads every page, and writes orders."""

from __future__ import annotations

import mmap
import os

from ..resilience.board import Page
from ..resilience.noted import PAGE_BYTES
from ..resilience.orders import RewindOrder
from ..resilience.terms import Order, OrderedBy


class Board:
    def __init__(self, ranks: int) -> None:
        """One cleared page per local rank, in a memfd that lives as long as this process."""
        self.fd = os.memfd_create("mt-resilient-board", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, ranks * PAGE_BYTES)
        memory = memoryview(mmap.mmap(self.fd, ranks * PAGE_BYTES))
        self.pages = [Page(memory[i * PAGE_BYTES : (i + 1) * PAGE_BYTES]) for i in range(ranks)]
        self._until_ns = 0

    @property
    def path(self) -> str:
        """Where ranks open it."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def clear(self, generation: int) -> None:
        """For a new generation; only while no rank is alive."""
        for page in self.pages:
            page.clear(generation)
            page.until_ns = self._until_ns

    def leased(self, until_s: float) -> None:
        """No rank shall cross a boundary after this time of the monotonic clock, in this generation or a later one; 0: they may."""
        self._until_ns = int(until_s * 1e9)
        for page in self.pages:
            page.until_ns = self._until_ns

    def fetching(self, on_its_way: bool) -> None:
        """All ranks shall wait for their part of the state before they restore it; or it has come, or never will."""
        for page in self.pages:
            page.fetching = int(on_its_way)

    def ask_durable(self) -> None:
        """One more snapshot on disk."""
        for page in self.pages:
            page.durable_step = -1
            page.durable += 1

    def ask_copy(self) -> None:
        """One more snapshot for the memory of other nodes."""
        for page in self.pages:
            page.copies += 1

    def turn_back(self, order: RewindOrder) -> None:
        """All ranks shall go back; the number last, since they look for it."""
        for page in self.pages:
            page.ordered_to, page.ordered_skip = order.to, order.skip
            page.ordered_by = tuple(OrderedBy).index(order.cause)
            page.ordered = order.number

    def pause(self, paused: bool) -> None:
        """All ranks shall wait at their next boundary; or go on."""
        for page in self.pages:
            page.paused = int(paused)

    def order(self, order: Order) -> None:
        """What all ranks shall do at their next boundary."""
        for page in self.pages:
            page.order = order
