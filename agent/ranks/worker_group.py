"""The processes of one generation: started, watched by pidfd, ended to the last, reaped.

The agent is a child subreaper, so whatever loses its parent becomes the agent's own child and cannot get lost: torchrun's workers have
sessions of their own, and killing its process group leaves them alive.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...resilience.clock import wall_s
from ...resilience.store.poll import readable
from .exit_codes import exit_code, open_pidfd, send
from .orphans import reap


@dataclass
class Watched:
    """One process of the worker group."""

    pid: int
    pidfd: int
    ended_s: float = 0.0
    """Wall-clock time when it was seen to be gone; 0 while it lives."""
    code: int | None = None
    out_of_memory: bool = False
    """The kernel has killed it for want of memory."""
    fenced: bool = False
    """It was ended because its agent had no lease any more."""
    missing: str = ""
    """The script, where Python has not found it; empty: it has."""
    nonsense: str = ""
    """What stood on its page, and could not be, so that it was ended; empty: it was not."""


@dataclass
class WorkerGroup:
    generation: int
    launcher: Watched
    how: str
    """`warm`, or `cold: why`."""
    ranks: dict[int, Watched] = field(default_factory=dict)
    """By local rank, from the moment each has claimed its page."""
    fenced: bool = False
    """Its own agent has ended it, for another generation may have begun."""
    unimportable: str = ""
    """Why the launcher's Python cannot import torch, where it has ended before it started a rank; empty: it can."""

    def adopt(self, local_rank: int, pid: int) -> None:
        """Watch a rank that has shown up on the board, or another process of it that trains."""
        known = self.ranks.get(local_rank)
        if known and known.pidfd >= 0:
            os.close(known.pidfd)
        self.ranks[local_rank] = watched(pid)

    def condemn(self, local_rank: int, why: str) -> None:
        """End a rank for what stands on its page; or, where it is not known yet which process that is, the launcher, and all with it."""
        process = self.ranks.get(local_rank, self.launcher)
        process.nonsense = why
        _kill(process)

    def watched(self) -> Iterable[Watched]:
        return (self.launcher, *self.ranks.values())

    def observe(self) -> bool:
        """Take note of who has ended; True when somebody has."""
        news, ended_fds = False, readable(self.living_fds())
        for process in self.watched():
            if process.pidfd in ended_fds:
                process.ended_s, news = wall_s(), True
                process.code = reap(process.pid) if process is self.launcher else exit_code(process.pid, process.pidfd)
        return news

    def living_fds(self) -> list[int]:
        return [p.pidfd for p in self.watched() if p.pidfd >= 0 and not p.ended_s]

    def living(self) -> set[int]:
        return {p.pid for p in self.watched() if not p.ended_s}

    def fence(self) -> None:
        """`kill`, and say so of each of them."""
        living = [process for process in self.watched() if not process.ended_s]
        self.kill()
        self.fenced = True
        for process in living:
            process.ended_s, process.code, process.fenced = wall_s(), -signal.SIGKILL, True

    def stop(self, number: int) -> None:
        """As a signal to torchrun alone would: it passes that on, waits for its ranks, and ends those that stay."""
        if self.launcher.pidfd >= 0 and not self.launcher.ended_s:
            send(self.launcher.pid, self.launcher.pidfd, number)

    def kill(self) -> None:
        """SIGKILL every process of this worker group that is known, at once; `Orphans.end` finds the others. SIGKILL and nothing softer:
        under Megatron's `--exit-signal-handler`, SIGTERM runs a collective and saves a bad state.
        """
        for process in self.watched():
            _kill(process)
        for process in self.watched():
            if process.pidfd >= 0:
                os.close(process.pidfd)
                process.pidfd = -1


def watched(pid: int) -> Watched:
    pidfd = open_pidfd(pid)
    return Watched(pid, -1, ended_s=wall_s()) if pidfd is None else Watched(pid, pidfd)


def _kill(process: Watched) -> None:
    if process.pidfd >= 0 and not process.ended_s:
        send(process.pid, process.pidfd, signal.SIGKILL)
