"""Ends all descendants of the agent, except its helper processes, when a worker group ends. Also reaps processes that a script has started
without waiting for them (`sh -c "… &"`): the agent becomes their parent.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection
from contextlib import suppress

import psutil

from ...resilience.clock import monotonic_s, sleep
from ...resilience.errors import MachineError
from .after_death import TIDY_S, tidies

END_S = 60.0
"""Seconds that killed processes may take to vanish. A driver that frees device memory takes about a second (measured 0.9 s), and releases
pinned memory of several ranks one after the other. A rank stuck in the kernel may take long."""
LOOK_S = 2.0
"""Seconds between two searches for dead children. The code that started one of the agent's own children reaps it within moments, partly in
threads. So a child that two searches in a row find dead is an orphan."""


class Orphans:
    def __init__(self) -> None:
        self._dead: set[int] = set()
        self._next_s = 0.0
        self._immortal: set[int] = set()
        """Pids of processes that SIGKILL has not ended within END_S seconds."""
        self._tidying: dict[psutil.Process, float] = {}
        """Clean-up processes, each with the monotonic time since when the agent has waited for it."""
        self.meanwhile: Callable[[], None] = lambda: None
        """Called again and again while `end` waits: the agent renews its lease."""

    def end(self, spare: Callable[[], Collection[int]], tidy_s: float = 0.0) -> None:
        """SIGKILL every descendant of the agent, and return when all are gone and reaped. Spare the processes whose pids `spare` returns at
        the moment. Wait at most `tidy_s` seconds for processes that clean up after others. Kill them if they take longer than TIDY_S.
        Raises MachineError if a process survives for END_S seconds.
        """
        began_s = monotonic_s()
        me = psutil.Process()
        killed: set[psutil.Process] = set()
        while left := _others(me.children(recursive=True), {*spare(), *self._immortal}):
            taken_s = monotonic_s() - began_s
            if taken_s > END_S:
                self._immortal.update(process.pid for process in left)
                names = ", ".join(str(p.pid) for p in left)
                raise MachineError(
                    f"processes {names} still exist {END_S:.0f} s after SIGKILL; the driver may hang. Reboot this node"
                )
            self._kill_late(began_s + taken_s)
            for process in left:
                if process not in killed and _tidies(process):  # checked once: reading a command line may block
                    self._tidying.setdefault(process, began_s)
                elif process not in self._tidying:
                    _kill(process)
                    killed.add(process)
                reap(process.pid)
            if killed.isdisjoint(left) and taken_s >= tidy_s:
                break
            self.meanwhile()
            sleep(0.002)
        forget_openmp([process.pid for process in killed])

    def reap(self, spare: Collection[int], now_s: float) -> None:
        """Reap orphans that have ended. spare: children that other code reaps, however late. now_s: monotonic."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + LOOK_S
        self._kill_late(now_s)
        dead = {pid for pid in _dead_children() if pid not in spare}
        for pid in dead & self._dead:
            reap(pid)
        self._dead = dead - self._dead

    def _kill_late(self, now_s: float) -> None:
        for process, since_s in list(self._tidying.items()):
            if now_s - since_s > TIDY_S:
                _kill(process)
            if not process.is_running():
                del self._tidying[process]


def reap(pid: int) -> int | None:
    """Reap the agent's own child `pid` if it has ended, and return its exit code; otherwise return None."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if found else None


def forget_openmp(pids: Collection[int], folder: str = "/dev/shm") -> None:
    """Remove the files in `folder` with which OpenMP (LLVM's, Intel's) registered these ended processes. A killed process cannot remove its
    own file."""
    for pid in pids:
        with suppress(OSError):
            os.unlink(f"{folder}/__KMP_REGISTERED_LIB_{pid}_{os.getuid()}")


def is_ours(pid: int, helpers: Collection[int]) -> bool:
    """Return whether the process is a descendant of this agent and not in `helpers`. Also True if the process has already ended."""
    try:
        return pid not in helpers and any(parent.pid == os.getpid() for parent in psutil.Process(pid).parents())
    except psutil.NoSuchProcess:
        return True


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGKILL)


def _tidies(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return tidies(" ".join((process.name(), *process.cmdline())))
    return False


def _others(processes: list[psutil.Process], spare: Collection[int]) -> list[psutil.Process]:
    return [process for process in processes if process.pid not in spare and not _below(process, spare)]


def _below(process: psutil.Process, spare: Collection[int]) -> bool:
    """Return whether the process descends from a process in `spare`."""
    try:
        return any(parent.pid in spare for parent in process.parents() if parent.pid != os.getpid())
    except psutil.NoSuchProcess:
        return False


def _dead_children() -> list[int]:
    with suppress(ChildProcessError):
        # Checked first, because listing the children reads all of /proc.
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return [child.pid for child in psutil.Process().children() if _is_dead(child)]
    return []


def _is_dead(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    return False
