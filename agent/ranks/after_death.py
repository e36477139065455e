"""Ends the processes that ranks have started (data loaders' workers, servers, programs) when the agent itself is killed.

Ranks die with their launcher, and the launcher dies with the agent. Processes that ranks have started may survive their ranks. So a tiny
program outside the agent's process group waits until the agent is dead. The program finds the ranks' processes by the agent's token, which
every descendant of a rank has in its environment.

    agent ──a pipe, which the kernel closes when the agent dies──▶ this file, as a program ──SIGKILL──▶ every process with the token
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

TRIES_S = 30.0
"""Seconds that the program keeps killing: a process may survive SIGKILL for a while, or start others meanwhile."""
TIDY_S = 5.0
"""Seconds that clean-up processes may take after other processes were killed. Python's resource tracker takes 20 ms; torch's manager sleeps
2 s before it exits."""
_LOOK_S = 0.05
_QUIET = 10
"""How many looks in a row must find no process. A process that is just starting a program has no environment for a moment."""
_IN_ORDER = b"in order\n"


class AfterDeath:
    def __init__(self, token: str) -> None:
        """token: a text that every rank of this agent has in its environment."""
        command = [sys.executable, "-I", "-S", __file__]
        quiet = subprocess.DEVNULL  # otherwise a reader of the agent's output would wait for this program
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
        )
        assert self._process.stdin
        with suppress(OSError):
            self._process.stdin.write(f"{token}\n".encode())
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def not_needed(self) -> None:
        """End the program. The agent exits normally, so processes that still run are intended."""
        with suppress(OSError):
            self._process.communicate(_IN_ORDER)


def tidies(command_line: str) -> bool:
    """Return whether a process with this command line cleans up after other processes. A clean-up process waits until the other processes
    have ended, and then unlinks their shared memory and semaphores (Python's `multiprocessing`, joblib's loky), or tensors shared by file
    (torch's `file_system`)."""
    return ".resource_tracker" in command_line or "torch_shm_manager" in command_line


def _with(token: bytes) -> list[tuple[int, str]]:
    """Return the pid and command line of each process that has the token in its environment."""
    found = []
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdigit() and token in _read(f"/proc/{name}/environ"):
                found.append((int(name), _read(f"/proc/{name}/cmdline").decode(errors="replace")))
    return found


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def main() -> None:
    token = sys.stdin.buffer.readline().strip()
    if sys.stdin.buffer.read() or not token:
        return
    quiet = 0
    for look in range(int(TRIES_S / _LOOK_S)):
        left = _with(token)
        quiet = 0 if left else quiet + 1
        for pid, command_line in left:
            if not tidies(command_line) or look * _LOOK_S > TIDY_S:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        if quiet == _QUIET:
            return
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    main()
