"""The ranks' own reports at each boundary, exchanged while the next step is computed.

Row of this rank → MAX over all ranks → a row again, the same on every rank. Ranks of one node write their rows on their board pages and
read each other's. With several nodes, the first rank of each exchanges rows with those of the others (`cross_node.py`). None of this
touches the script's collectives.
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
"""Sleeps while a rank of this node has not written its row: doubled from the first to the second."""


class Sentinel:
    def __init__(self, at: Attachment) -> None:
        """Collective: every rank makes its sentinel at the same place of its program."""
        self._exchange = _exchange(at, os.environ)
        self._pending = False

    def contribute(self, row: Row) -> None:
        """Report this rank's row. Returns at once."""
        if self._pending:  # from a loop that ended before its last step was judged
            self._exchange.reduced()
        self._exchange.say(row)
        self._pending = True

    def take(self) -> Row | None:
        """Return the greatest of all ranks' numbers of the last contribution, and wait for them if necessary; None: none are due."""
        if not self._pending:
            return None
        self._pending = False
        return self._exchange.reduced()

    def greatest(self, *values: float) -> Row:
        """Return the greatest of all ranks' first, second, … value. Collective: it waits for all ranks, and no row may be pending."""
        self._exchange.say((*values, *[0.0] * (ROW - len(values))))
        return self._exchange.reduced()[: len(values)]

    def extremes(self, value: float) -> tuple[float, float]:
        """Return the least and the greatest `value` of all ranks. Collective, as `greatest`."""
        greatest, least = self.greatest(value, -value)
        return -least, greatest


def _exchange(at: Attachment, environ: Mapping[str, str]) -> Exchange:
    """Return the exchange that this machine and the job's size allow: the same on all ranks of machines of one kind."""
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
    """`say` and `reduced` are called in turn, on every rank."""

    def say(self, mine: Row) -> None: ...

    def reduced(self) -> Row: ...


class Pages:
    """Exchanges rows through the memory that all ranks of one node share: no system call, no thread, nothing to wake."""

    def __init__(self, mine: Page, all_ranks: Sequence[Page]) -> None:
        self._mine, self._others = mine, [page for page in all_ranks if page is not mine]
        self._ordinal = mine.spoken  # by an earlier sentinel of this process
        self._said: Row = ()

    def say(self, mine: Row) -> None:
        self._ordinal += 1
        self._said = mine
        self._mine.speak(self._ordinal, mine)

    def reduced(self) -> Row:
        known = self._said
        for page in self._others:
            heard = page.hear(self._ordinal) or _heard(page, self._ordinal)
            if heard != known:  # mostly they are equal
                known = tuple(map(max, known, heard))
        return known


class Nodes:
    """Exchanges rows through the pages of the node to its first rank, and back from that rank's page. The first rank speaks again only when
    all others of its node have spoken. By then they have read what it said before: so a page's two places are enough for it too."""

    def __init__(self, mine: Page, of_node: Sequence[Page], rounds: Rounds | None) -> None:
        """of_node: the pages of all ranks of this node. rounds: only on the first of these ranks."""
        self._mine, self._first, others = mine, of_node[0], of_node[1:]
        self._ordinal = mine.spoken  # by an earlier sentinel of this process
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
    """Return what this page says under that number. It waits forever, since the agent looks after ranks that hang. Raises the error that
    has ended the `speaker`, if one is to write the page; UsageError if the page's rank has left the loop."""
    pause_s = _SHORTEST_S
    while (said := page.hear(ordinal)) is None:
        if speaker and speaker.failure:
            raise speaker.failure
        if page.phase == RankPhase.FINISHED and page.hear(ordinal) is None:
            raise UsageError(
                f"rank {page.rank} has done all its steps, {page.step}, and this rank has more: all ranks of a Session do the same number"
            )
        sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_S)
    return said


class Group:
    """Exchanges rows by an all-reduce that runs in gloo's threads meanwhile."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=NO_END)
        # Made once and kept. Gloo's threads would have to wait for the GIL to free a tensor that only they still hold. A thread that
        # destroys the group meanwhile holds the GIL and waits for them (met with torch 2.13).
        self._rows = [torch.zeros(ROW, dtype=torch.float64, device="cpu") for _ in range(2)]
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp.MAX
        self._turn = 0

    def say(self, mine: Row) -> None:
        self._turn ^= 1
        self._rows[self._turn].numpy()[:] = mine
        # The group's own method: the checks and logging of dist.all_reduce cost half of the contribution (measured).
        self._work = self._group.allreduce([self._rows[self._turn]], self._options)

    def reduced(self) -> Row:
        self._work.wait()
        return tuple(self._rows[self._turn].tolist())
