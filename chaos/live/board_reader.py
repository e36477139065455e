"""What the ranks of a running agent have written on its board, read from outside: it needs no etcd and disturbs nobody."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ...resilience.ipc.board_events import PAGE_BYTES
from ...resilience.ipc.board_layout import Page


class BoardReader:
    def __init__(self) -> None:
        self._agent, self._file = 0, ""

    def pages(self, agent: int) -> list[Page]:
        """Return a copy of each local rank's page; empty: the process `agent` has no board (yet)."""
        if agent != self._agent or not self._file:
            self._agent, self._file = agent, _board(agent)
        if not self._file:
            return []
        with suppress(OSError):
            raw = Path(self._file).read_bytes()
            return [Page(memoryview(bytearray(raw[at : at + PAGE_BYTES]))) for at in range(0, len(raw), PAGE_BYTES)]
        return []


def memfds(agent: int, name: str) -> list[str]:
    """Return the paths by which the agent's memory files whose names begin with `name` can be opened."""
    home, found = f"/proc/{agent}/fd", []
    with suppress(OSError):
        for number in os.listdir(home):
            with suppress(OSError):
                if os.readlink(f"{home}/{number}").startswith(f"/memfd:{name}"):
                    found.append(f"{home}/{number}")
    return found


def _board(agent: int) -> str:
    return next(iter(memfds(agent, "mt-resilient-board")), "")
