"""The worker group: the launcher and the ranks of one generation on this node. The agent watches each process through a pidfd, ends it, and
reaps it.

The agent is a child subreaper: a descendant that loses its parent becomes the agent's own child. Killing torchrun's process group would
leave its workers alive, because they have sessions of their own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from ...resilience.clock import monotonic_s, wall_s
from ...resilience.store.poll import readable
from .exit_codes import KILLED_S, exit_code, killed, looked_at, open_pidfd, send
from .orphans import reap


@dataclass
class Watched:
    """One process of the worker group."""

    pid: int
    pidfd: int
    killed_fd: int = -1
    """A descriptor that becomes readable once the kernel takes the process down, which is before the pidfd does; -1: there is only the
    pidfd."""
    ended_s: float = 0.0
    """Wall-clock time when the agent saw that the process had ended, or that the kernel takes it down; 0 while it lives."""
    code: int | None = None
    out_of_memory: bool = False
    """The kernel has killed the process because memory ran out."""
    oom_killer_active: bool = False
    """The kernel has killed a process because memory ran out, and it is not known which one."""
    fenced: bool = False
    """The agent has ended the process because the agent's lease had expired."""
    missing: str = ""
    """The script that Python did not find; empty: it found the script."""
    last_lines: str = ""
    """The last lines that a rank has printed before it ended."""
    nonsense: str = ""
    """The impossible value on the rank's page because of which the agent ended it; empty: there was none."""


CLOCK_SET_S = 0.01
"""If the clock of the day has moved by this much against the monotonic clock, somebody has set it. Less is the noise of reading both."""


@dataclass
class WorkerGroup:
    generation: int
    launcher: Watched
    how: str
    """`warm`, or `cold: why`."""
    ranks: dict[int, Watched] = field(default_factory=dict)
    """The ranks' processes, by local rank. A rank is added when it claims its page (its shared memory)."""
    fenced: bool = False
    """The agent has ended this worker group because another generation may have begun."""
    unimportable: str = ""
    """Why the launcher's Python cannot import torch, checked if the launcher ended before it started a rank; empty: no such reason is
    known."""
    _offset_s: float = 0.0

    @property
    def offset_s(self) -> float:
        """The wall clock minus the monotonic clock, in seconds: the same number each time, unless the clock was set. Otherwise each of the
        ranks' times would differ by some 0.1 µs in every status, and every status would be news."""
        now_s = wall_s() - monotonic_s()
        if abs(now_s - self._offset_s) > CLOCK_SET_S:
            self._offset_s = now_s
        return self._offset_s

    def adopt(self, local_rank: int, pid: int) -> None:
        """Watch process `pid`, which has claimed this rank's page. The new process may replace an earlier process of the rank."""
        if known := self.ranks.get(local_rank):
            _close(known)
        self.ranks[local_rank] = process = watched(pid)
        if process.pidfd >= 0:
            with suppress(OSError, RuntimeError):  # no descriptor or thread is left: the pidfd alone tells
                process.killed_fd = looked_at(pid, KILLED_S) or -1

    def condemn(self, local_rank: int, why: str) -> None:
        """Kill a rank because of an impossible value on its page. If the rank's process is not known yet, kill the launcher, and all ranks
        with it."""
        process = self.ranks.get(local_rank, self.launcher)
        process.nonsense = why
        _kill(process)

    def watched(self) -> Iterable[Watched]:
        return (self.launcher, *self.ranks.values())

    def observe(self) -> bool:
        """Record which processes have ended. Return True if any process has newly ended."""
        news, ended_fds = False, readable(self.living_fds())
        for process in self.watched():
            if process.pidfd in ended_fds:
                process.ended_s, news = wall_s(), True
                process.code = reap(process.pid) if process is self.launcher else exit_code(process.pid, process.pidfd)
        for process in self.ranks.values():
            if process.killed_fd in ended_fds and not process.ended_s:
                if code := killed(process.pid):
                    process.ended_s, process.code, news = wall_s(), code, True
                else:  # otherwise the descriptor would stay readable
                    os.close(process.killed_fd)
                    process.killed_fd = -1
        return news

    def living_fds(self) -> list[int]:
        return [fd for p in self.watched() if not p.ended_s for fd in (p.pidfd, p.killed_fd) if fd >= 0]

    def living(self) -> set[int]:
        return {p.pid for p in self.watched() if not p.ended_s}

    def fence(self) -> None:
        """Kill all processes, and mark each process that was alive as fenced."""
        living = [process for process in self.watched() if not process.ended_s]
        self.kill()
        self.fenced = True
        for process in living:
            process.ended_s, process.code, process.fenced = wall_s(), -signal.SIGKILL, True

    def stop(self, number: int) -> None:
        """Send a signal to torchrun alone. torchrun passes the signal on, waits for its ranks, and kills those that do not exit."""
        if self.launcher.pidfd >= 0 and not self.launcher.ended_s:
            send(self.launcher.pid, self.launcher.pidfd, number)

    def kill(self) -> None:
        """SIGKILL every known process of this worker group immediately; `Orphans.end` finds the others. No softer signal is safe: under
        Megatron's `--exit-signal-handler`, SIGTERM runs a collective and saves a bad state.
        """
        for process in self.watched():
            _kill(process)
        for process in self.watched():
            _close(process)


def _close(process: Watched) -> None:
    for descriptor in (process.pidfd, process.killed_fd):
        if descriptor >= 0:
            os.close(descriptor)
    process.pidfd = process.killed_fd = -1


def watched(pid: int) -> Watched:
    pidfd = open_pidfd(pid)
    return Watched(pid, -1, ended_s=wall_s()) if pidfd is None else Watched(pid, pidfd)


def _kill(process: Watched) -> None:
    if process.pidfd >= 0 and not process.ended_s:
        send(process.pid, process.pidfd, signal.SIGKILL)
