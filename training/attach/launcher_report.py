"""The launcher's report to the agent: each rank's state when the launcher began to end its ranks, and the signal that ended the launcher.

torchrun ──page of each rank──▶ agent/ranks/status_report.py, which does not blame a rank that the launcher has ended

A rank's page is its block of the board (memory that the agent and the ranks share).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from ...resilience.ipc.board_layout import Page
from ...resilience.ipc.die_with_parent import parent_of
from ...resilience.ipc.handoff import VARIABLE, Handoff
from .board import page_of

MODULE = "torch.distributed.elastic.multiprocessing.api"
"""torchrun's module that starts and ends ranks."""


def wrap(module: ModuleType) -> None:
    """Make torchrun write its ranks' states on their pages before it sends them a signal. A torchrun that a rank started has no pages."""
    if _below_a_rank():
        return
    torchrun: Any = module  # Any, because torch's type stubs lack an attribute
    close, end = torchrun.SubprocessContext._close, torchrun._terminate_process_handler

    def tell_and_close(context: Any, *arguments: Any, **options: Any) -> None:
        for local_rank, page in _pages():
            handler = context.subprocess_handlers.get(local_rank)
            if handler and not page.launched_pid:  # torchrun calls `_close` more than once
                if page.pid == 0:
                    page.rank = int(context.envs[local_rank]["RANK"])
                page.say_seen(handler.proc.pid, handler.proc.poll())
        close(context, *arguments, **options)

    def tell_and_end(number: int, frame: Any) -> None:
        for _, page in _pages():
            page.launcher_signal = number
        end(number, frame)

    torchrun.SubprocessContext._close = tell_and_close
    torchrun._terminate_process_handler = tell_and_end


def _below_a_rank() -> bool:
    """Whether a rank has started this torchrun, with the rank's handoff but without torchrun's variables."""
    ours, pid = VARIABLE.encode() + b"=" + os.environb.get(VARIABLE.encode(), b""), os.getppid()
    while pid:
        with suppress(OSError):  # another user's process
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if ours in variables and any(each.startswith(b"TORCHELASTIC_RUN_ID=") for each in variables):
                return True
        pid = parent_of(pid)
    return False


def _pages() -> Iterator[tuple[int, Page]]:
    """Yield this node's local ranks and their pages, while the board belongs to this generation."""
    handoff = Handoff.from_environment(os.environ)
    if handoff is None:
        return
    for local_rank in range(len(handoff.arena)):
        with suppress(OSError):
            page = page_of(handoff, local_rank, writable=True)
            if page.generation == handoff.generation:
                yield local_rank, page
            page.release()
