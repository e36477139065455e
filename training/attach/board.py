"""The rank's side of the board (the shared memory with one page per rank): finds and claims this rank's page, and reads the others."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ...resilience.ipc.board_events import PAGE_BYTES
from ...resilience.ipc.board_layout import Page
from ...resilience.ipc.descriptor_client import opened
from ...resilience.ipc.handoff import Handoff, local_rank
from ...resilience.ipc.shared_memory import mapped
from ...resilience.model.types import RankPhase


def page_of(handoff: Handoff, local_rank: int, *, writable: bool = False) -> Page:
    descriptor = opened(handoff.board, os.O_RDWR if writable else os.O_RDONLY)
    try:
        return Page(mapped(descriptor, PAGE_BYTES, local_rank * PAGE_BYTES, writable=writable))
    finally:
        os.close(descriptor)


def claim(handoff: Handoff, environ: Mapping[str, str], now_ns: int, *, trains: bool) -> Page | None:
    """Return the page of this process's rank. Return None if another process of this generation has the page. Also return None if the page
    belongs to another generation: this process is then a leftover of an earlier generation. Also return None if there are more local ranks
    than pages: this process then belongs to a torchrun that a rank has started. trains: a training loop begins in this process.
    A process with a loop takes the page from a process of the same rank without a loop, which has started it and waits for it."""
    number = local_rank(environ)
    # Such a page would lie beyond the board's end.
    if max(number + 1, int(environ.get("LOCAL_WORLD_SIZE") or 0)) > len(handoff.arena):
        return None
    page = page_of(handoff, number, writable=True)
    taken = page.pid not in (0, os.getpid()) and (not trains or page.phase > RankPhase.ATTACHED)
    if page.generation != handoff.generation or taken:
        page.release()
        return None
    page.listens = page.left = 0  # the previous process's entries no longer count
    page.say_farewell()
    page.rank = int(environ["RANK"])
    page.attached_ns = now_ns
    page.phase = RankPhase.ATTACHED
    page.pid = os.getpid()  # last: the agent watches a page once it has a pid
    return page
