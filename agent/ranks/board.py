"""The agent's side of the board. The board is shared memory with one page per rank: the rank writes its state on its page, and the agent
writes orders (commands to the ranks) on it.

A faulty rank may write anything on its page, at any time. So the agent copies a page, validates the copy (`page_validation`), and reads
only valid copies.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from ...resilience.ipc.board_events import PAGE_BYTES
from ...resilience.ipc.board_layout import Page
from ...resilience.ipc.page_validation import Orders, nonsense
from ...resilience.ipc.shared_memory import mapped, memory
from ...resilience.model.generation import GenerationRecord, RewindOrder
from ...resilience.model.types import NodeId, Order, OrderedBy, RankPhase
from .descriptor_server import Door
from .orphans import is_ours
from .worker_group import WorkerGroup


class Board:
    def __init__(self, ranks: int) -> None:
        """Create one zeroed page per local rank, in an in-memory file that exists as long as this process."""
        self.fd = memory("mt-resilient-board", ranks * PAGE_BYTES)
        shared = mapped(self.fd, ranks * PAGE_BYTES)
        self._live = [Page(shared[i * PAGE_BYTES : (i + 1) * PAGE_BYTES]) for i in range(ranks)]
        self.pages = [Page(memoryview(bytearray(PAGE_BYTES))) for _ in range(ranks)]
        """The last valid copy of each rank's page."""
        self.orders = Orders()
        """The orders that the agent has written on all pages."""
        self._wrong: set[int] = set()

    @property
    def path(self) -> str:
        """The path with which ranks open the board."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def look(self, pids: Mapping[int, int]) -> dict[int, str]:
        """Copy the ranks' pages. Return, by local rank, why a page has newly become invalid. The agent ignores an invalid page for the rest
        of the generation. pids: the process that has claimed each page, if known."""
        found: dict[int, str] = {}
        for local_rank, (live, page) in enumerate(zip(self._live, self.pages, strict=True)):
            copy = bytearray(live.raw)
            if local_rank in self._wrong or copy == page.raw:
                continue
            if why := nonsense(Page(memoryview(copy)), self.orders, pids.get(local_rank, 0)):
                self._wrong.add(local_rank)
                found[local_rank] = why
            else:
                page.raw[:] = copy
        return found

    def trained(self, record: GenerationRecord | None, node: NodeId) -> Sequence[Page]:
        """Return the pages of this `node`'s ranks; none while it stands by."""
        return self.pages if record is None or node in record.members else ()

    def all_training(self) -> bool:
        """Return whether all local ranks are in their training loop."""
        return all(page.phase == RankPhase.TRAINING for page in self.pages)

    def finished_step(self) -> int:
        """Return the newest step that all local ranks have finished."""
        return min(page.step for page in self.pages)

    def unsavable(self) -> bool:
        """Return whether some rank's state now contains an object that cannot be saved in a snapshot."""
        return any(page.unsaved for page in self.pages)

    def refuse(self, local_rank: int) -> None:
        """Ignore the page for the rest of the generation, because the process that claimed it is not one of this agent's ranks."""
        self._wrong.add(local_rank)
        self.pages[local_rank].pid = 0

    def clear(self, generation: int) -> None:
        """Clear all pages for a new generation. Call `clear` only while no rank is alive."""
        self._wrong.clear()
        self.orders = Orders(generation=generation, until_ns=self.orders.until_ns)
        for page in (*self._live, *self.pages):
            page.clear(generation)
            page.until_ns = self.orders.until_ns

    def leased(self, until_s: float) -> None:
        """Forbid every rank to pass a step boundary after the monotonic time `until_s`, in this generation or a later one; 0: no limit."""
        self._write(until_ns=int(until_s * 1e9))

    def fetching(self, on_its_way: bool) -> None:
        """Command all ranks to wait for their part of the state before they restore it. on_its_way: False if the part has arrived, or never
        will."""
        self._write(fetching=int(on_its_way))

    def ask_durable(self) -> None:
        """Command the ranks to take one more snapshot for the disk."""
        for page in (*self._live, *self.pages):
            page.durable_step = -1
        self._write(durable=self.orders.durable + 1)

    def ask_copy(self) -> None:
        """Command the ranks to take one more snapshot that will be copied into another node's memory."""
        self._write(copies=self.orders.copies + 1)

    def turn_back(self, order: RewindOrder) -> None:
        """Command all ranks to rewind. The order's number is written last, because ranks poll this number."""
        by = tuple(OrderedBy).index(order.cause)
        self._write(ordered_to=order.to, ordered_skip=order.skip, ordered_by=by, ordered=order.number)

    def pause(self, paused: bool) -> None:
        """Command all ranks to wait at their next step boundary, or (False) to continue."""
        self._write(paused=int(paused))

    def order(self, order: Order) -> None:
        """Command what all ranks do at their next step boundary."""
        self._write(order=int(order))

    def _write(self, **orders: int) -> None:
        """Write the given fields on all pages, in the sequence given."""
        self.orders = replace(self.orders, **orders)
        for page in (*self._live, *self.pages):
            for name, value in orders.items():
                setattr(page, name, value)


def read(board: Board, door: Door, group: WorkerGroup, helpers: Set[int], *, observe: bool) -> list[str]:
    """Copy the ranks' pages, watch the processes that claim pages, and end those that wrote impossible values. Return a sentence for each
    new fault. helpers: the agent's child processes that are not ranks. observe: end no process."""
    # Before its training loop begins, a process may pass its page on to a process that it has started.
    trains = (local_rank for local_rank in group.ranks if board.pages[local_rank].phase > RankPhase.ATTACHED)
    wrong = board.look({local_rank: board.pages[local_rank].pid for local_rank in trains})
    sentences = []
    for local_rank, page in enumerate(board.pages):
        pid, known = door.pids.get((local_rank, page.pid), page.pid), group.ranks.get(local_rank)
        if page.pid and (known is None or known.pid != pid):
            if pid != page.pid or is_ours(pid, helpers):
                group.adopt(local_rank, pid)
            else:
                board.refuse(local_rank)
                sentences.append(
                    f"local rank {local_rank} reports that it is process {page.pid}, but this agent has no such process. The agent does "
                    "not watch it"
                )
    for local_rank, why in wrong.items():
        does = "does nothing while observing" if observe else "ends it"
        sentences.append(
            f"local rank {local_rank} has written over its page ({why}). The agent {does}, and ignores its page from now on. "
            "Code in that process has written beyond its own memory, or into a file descriptor that is not its own"
        )
        if not observe:
            group.condemn(local_rank, why)
    return sentences
