"""Reads the ranks' pages (shared memory): which process writes which page. Ignores what no rank of this agent can have written."""

from __future__ import annotations

from collections.abc import Set

from ...resilience.model.types import RankPhase
from .board import Board
from .descriptor_server import Door
from .orphans import is_ours
from .worker_group import WorkerGroup


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
