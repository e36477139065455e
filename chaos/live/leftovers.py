"""What the runs leave behind: processes, files in shared memory, temporary files. Ends all processes that descend from this one."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil

from ...resilience.clock import monotonic_s, sleep

_SHARED = Path("/dev/shm")
_NAMED_BY_RANKS = ("mt-resilient", "torch_", "psm_", "sem.mp-", "__KMP_REGISTERED_LIB_")
"""Beginnings of names in shared memory that this program, torch, Python and OpenMP give. Other programs use shared memory too."""
_SETTLE_S = 15.0
"""For how long processes may still clean up after the last agent."""


def shared_files() -> set[str]:
    with suppress(OSError):
        return {name for name in os.listdir(_SHARED) if name.startswith(_NAMED_BY_RANKS)}
    return set()


def processes() -> list[psutil.Process]:
    """Return the living descendants, and reap the dead ones that this process has adopted."""
    alive = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
            elif process.ppid() == os.getpid():
                with suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)
    return alive


class Watch:
    """Notes what is there before a run, and finds what the run leaves behind."""

    def __init__(self, temporary: Path) -> None:
        """temporary: the run's folder for temporary files."""
        self._temporary = temporary
        self._shared, self._files = shared_files(), {*os.listdir(temporary)}

    def left(self) -> tuple[str, ...]:
        """Return what is left once all processes of the run should be gone."""
        end_s = monotonic_s() + _SETTLE_S
        while (alive := processes()) and monotonic_s() < end_s:
            sleep(0.1)
        found = [f"process {process.pid}: {_command(process)}" for process in alive]
        found += [f"{_SHARED / name}" for name in sorted(shared_files() - self._shared) if _of_nobody(name)]
        found += [str(self._temporary / name) for name in sorted({*os.listdir(self._temporary)} - self._files)]
        return tuple(found)


def _of_nobody(name: str) -> bool:
    """Return whether no process has the file of shared memory open or mapped: those of other programs that run beside have."""
    path = str(_SHARED / name)
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if path in Path(f"/proc/{process.pid}/maps").read_text(errors="replace"):
                return False
            folder = f"/proc/{process.pid}/fd"
            if any(os.readlink(f"{folder}/{number}") == path for number in os.listdir(folder)):
                return False
    return True


def end_everything() -> None:
    """Kill all descendants until none is left."""
    while alive := processes():
        for process in alive:
            with suppress(psutil.Error):
                process.kill()
        sleep(0.02)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:120] or process.name()
    except psutil.Error:
        return "its command line cannot be read"
