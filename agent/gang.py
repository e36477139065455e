"""The processes of one generation: started, watched by pidfd, ended to the last, reaped.

The agent is a child subreaper, so whatever loses its parent becomes the agent's own child and cannot get lost: torchrun's workers have
sessions of their own, and killing its process group leaves them alive.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from ..resilience.clock import monotonic_s, sleep, wall_s
from ..resilience.errors import InternalError
from ..resilience.polling import readable
from .exits import exit_code, open_pidfd

END_S = 60.0
"""How long killed processes may take to vanish: a driver that frees device memory takes about a second (measured 0.9 s), a rank stuck in
the kernel may take long."""


@dataclass
class Watched:
    """One process of the gang."""

    pid: int
    pidfd: int
    ended_s: float = 0.0
    """Wall-clock time when it was seen to be gone; 0 while it lives."""
    code: int | None = None
    out_of_memory: bool = False
    """The kernel has killed it for want of memory."""
    fenced: bool = False
    """It was ended because its agent had no lease any more."""


@dataclass
class Gang:
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
        if pid and (known is None or known.pid != pid):
            if known and known.pidfd >= 0:
                os.close(known.pidfd)
            pidfd = open_pidfd(pid)
            gone = Watched(pid, -1, ended_s=wall_s())
            self.ranks[local_rank] = Watched(pid, pidfd) if pidfd is not None else gone

    def watched(self) -> Iterable[Watched]:
        return (self.launcher, *self.ranks.values())

    def observe(self) -> bool:
        """Take note of who has ended; True when somebody has."""
        news, ended_fds = False, readable(self.living_fds())
        for process in self.watched():
            if process.pidfd in ended_fds:
                process.ended_s, news = wall_s(), True
                process.code = _reap(process.pid) if process is self.launcher else exit_code(process.pid, process.pidfd)
        return news

    def living_fds(self) -> list[int]:
        return [p.pidfd for p in self.watched() if p.pidfd >= 0 and not p.ended_s]

    def fence(self, spare: Collection[int]) -> None:
        """`kill`, and say so of each of them."""
        living = [process for process in self.watched() if not process.ended_s]
        self.kill(spare)
        self.fenced = True
        for process in living:
            process.ended_s, process.code, process.fenced = wall_s(), -signal.SIGKILL, True

    def kill(self, spare: Collection[int]) -> None:
        """SIGKILL every process of this gang and every stray child of the agent but those in `spare`; returns when all are gone and
        reaped. SIGKILL and nothing softer: under Megatron's `--exit-signal-handler`, SIGTERM runs a collective and saves a bad state.

        Raises InternalError when something survives for END_S.
        """
        for process in self.watched():  # these first: looking for strays reads all of /proc
            if process.pidfd >= 0 and not process.ended_s:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process.pidfd, signal.SIGKILL)
        end_strays(spare)
        for process in self.watched():
            if process.pidfd >= 0:
                os.close(process.pidfd)
                process.pidfd = -1


def end_strays(spare: Collection[int]) -> None:
    """SIGKILL every process below the agent but those in `spare`; returns when all are gone and reaped. Raises InternalError when
    something survives for END_S."""
    deadline = monotonic_s() + END_S
    me = psutil.Process()
    while left := [p for p in me.children(recursive=True) if p.pid not in spare and not _below(p, spare)]:
        if monotonic_s() > deadline:
            names = ", ".join(str(p.pid) for p in left)
            raise InternalError(
                f"processes {names} do not end although killed; the driver may hang: this node needs a reboot"
            )
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        for process in left:
            _reap(process.pid)
        sleep(0.002)


def _reap(pid: int) -> int | None:
    """Exit code of our own child `pid` if it has ended."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if found else None


def _below(process: psutil.Process, spare: Collection[int]) -> bool:
    """Whether it descends from one of the agent's own helpers."""
    try:
        return any(parent.pid in spare for parent in process.parents() if parent.pid != os.getpid())
    except psutil.NoSuchProcess:
        return False
