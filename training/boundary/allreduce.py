"""Exchanges the ranks' own reports at each boundary (the moment between two steps), while the next step is computed.

A report is a row of numbers. Row of this rank → MAX over all ranks → one row, the same on every rank. Ranks of one node write their rows on
their pages of shared memory and read each other's. With several nodes, the first rank of each node (local rank 0) exchanges rows with the
first ranks of the other nodes (`cross_node.py`). This module does not use the script's collectives.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from ...resilience.clock import sleep
from ...resilience.errors import UsageError
from ...resilience.inprocess.tally import ROW
from ...resilience.ipc.board_layout import Page
from ...resilience.model.types import RankPhase
from ..attach.attach import Attachment
from ..attach.board import page_of
from .cross_node import NO_END, Rounds, Row, Speaker

_SHORTEST_S, _LONGEST_S = 2e-5, 2e-3
"""Seconds between two polls while a rank of this node has not written its row. The pause starts at the first value and doubles up to the
second."""


class Sentinel:
    def __init__(self, at: Attachment) -> None:
        """Collective: every rank must create its sentinel at the same point of its program."""
        self._exchange = _exchange(at, os.environ)
        self._pending = False

    def contribute(self, row: Row) -> None:
        """Report this rank's row. Returns immediately."""
        if self._pending:  # the row of a loop that ended before its last step was judged
            self._exchange.reduced()
        self._exchange.say(row)
        self._pending = True

    def take(self) -> Row | None:
        """Return, for each number of the last contributed row, the greatest value of all ranks. Wait for the other ranks if necessary.
        Return None if no row was contributed since the last call."""
        if not self._pending:
            return None
        self._pending = False
        return self._exchange.reduced()

    def greatest(self, *values: float) -> Row:
        """Return, for each of `values`, the greatest value of all ranks. Collective: it waits for all ranks, and no row may be pending."""
        self._exchange.say((*values, *[0.0] * (ROW - len(values))))
        return self._exchange.reduced()[: len(values)]

    def extremes(self, value: float) -> tuple[float, float]:
        """Return the least and the greatest `value` of all ranks. Collective, like `greatest`."""
        greatest, least = self.greatest(value, -value)
        return -least, greatest


def _exchange(at: Attachment, environ: Mapping[str, str]) -> Exchange:
    """Return the kind of exchange for this machine and job size. All ranks get the same kind if their machines are of the same kind."""
    world, local = dist.get_world_size() if dist.is_initialized() else 1, len(at.handoff.arena)
    if world == 1:
        return Pages(at.page, [at.page])
    if platform.machine() not in ("x86_64", "AMD64") or "GROUP_WORLD_SIZE" not in environ:  # see ipc/board_layout.py
        return Group()
    pages = [page_of(at.handoff, local_rank) for local_rank in range(local)]
    if world == local:
        return Pages(at.page, pages)
    rounds = Rounds(int(environ["GROUP_RANK"]), int(environ["GROUP_WORLD_SIZE"])) if at.local_rank == 0 else None
    return Nodes(at.page, pages, rounds)


class Exchange(Protocol):
    """Exchanges rows between ranks. Every rank calls `say` and `reduced` alternately."""

    def say(self, mine: Row) -> None: ...

    def reduced(self) -> Row: ...


class Pages:
    """Exchanges rows through memory that all ranks of one node share: without system calls, threads or wake-ups."""

    def __init__(self, mine: Page, all_ranks: Sequence[Page]) -> None:
        self._mine, self._others = mine, [page for page in all_ranks if page is not mine]
        self._ordinal = mine.spoken  # greater than 0 after an earlier sentinel of this process
        self._said: Row = ()

    def say(self, mine: Row) -> None:
        self._ordinal += 1
        self._said = mine
        self._mine.speak(self._ordinal, mine)

    def reduced(self) -> Row:
        known = self._said
        for page in self._others:
            heard = page.hear(self._ordinal) or _heard(page, self._ordinal)
            if heard != known:  # usually they are equal
                known = tuple(map(max, known, heard))
        return known


class Nodes:
    """Exchanges rows through the pages of a node's ranks to its first rank, and back from that rank's page. The first rank writes again
    only after all other ranks of its node have written. By then they have read its last row, so a page's two places for rows suffice for
    the first rank too."""

    def __init__(self, mine: Page, of_node: Sequence[Page], rounds: Rounds | None) -> None:
        """of_node: the pages of all ranks of this node. rounds: None except on the node's first rank."""
        self._mine, self._first, others = mine, of_node[0], of_node[1:]
        self._ordinal = mine.spoken  # greater than 0 after an earlier sentinel of this process
        self._speaker = (
            None
            if rounds is None
            else Speaker(rounds, lambda ordinal: [_heard(p, ordinal) for p in others], mine.speak)
        )

    def say(self, mine: Row) -> None:
        self._ordinal += 1
        (self._speaker.say if self._speaker else self._mine.speak)(self._ordinal, mine)

    def reduced(self) -> Row:
        return self._first.hear(self._ordinal) or _heard(self._first, self._ordinal, self._speaker)


def _heard(page: Page, ordinal: int, speaker: Speaker | None = None) -> Row:
    """Return the row with this ordinal from the page. Waits without limit, because the agent handles ranks that hang. If a `speaker` has to
    write the page and has failed, raises its error. Raises UsageError if the page's rank has finished its loop."""
    pause_s = _SHORTEST_S
    while (said := page.hear(ordinal)) is None:
        if speaker and speaker.failure:
            raise speaker.failure
        if page.phase == RankPhase.FINISHED and page.hear(ordinal) is None:
            raise UsageError(
                f"rank {page.rank} has ended its loop after {page.step} steps, and this rank has more steps. Let all ranks of a "
                "Session do the same number of steps"
            )
        sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_S)
    return said


class Group:
    """Exchanges rows by an all-reduce that runs in gloo's threads during the next step."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=NO_END)
        # These tensors live as long as the group. If only gloo's threads still referred to a tensor, they would wait for the GIL to free
        # it. A thread that destroys the group meanwhile holds the GIL and waits for these threads (observed with torch 2.13).
        self._rows = [torch.zeros(ROW, dtype=torch.float64, device="cpu") for _ in range(2)]
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp.MAX
        self._turn = 0

    def say(self, mine: Row) -> None:
        self._turn ^= 1
        self._rows[self._turn].numpy()[:] = mine
        # This is the group's own method: the checks and logging of dist.all_reduce would take half of this call's time (measured).
        self._work = self._group.allreduce([self._rows[self._turn]], self._options)

    def reduced(self) -> Row:
        self._work.wait()
        return tuple(self._rows[self._turn].tolist())
