"""Starts a child process that cannot outlive this agent.

`spawn` runs this file as a small program between the agent and the command. The program asks the kernel to SIGKILL its process when the
agent dies (the setting survives exec), and then becomes the command. A `preexec_fn` would do the same in a fork of the agent, where gRPC's
threads make forking unsafe (measured: 13 of 60 forked children hung).
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_GET_PDEATHSIG = 2
_PR_SET_CHILD_SUBREAPER = 36
_LOOKS_S = 0.1
"""Seconds between two checks whether a process exists, if the kernel has no pidfds."""


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when process `parent_pid`, which must be the caller's parent, ends. If the parent has ended, exit
    immediately."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(128 + signal.SIGKILL)


def die_with(pid: int) -> None:
    """SIGKILL this process when process `pid`, which is not its parent, ends. A thread waits for that."""
    from ..store.poll import readable  # not at the top, because this file is also a program
    from .file_descriptors import high

    watched = None
    try:
        watched = high(os.pidfd_open(pid))
    except ProcessLookupError:
        os._exit(128 + signal.SIGKILL)
    except OSError:  # the kernel refuses a pidfd
        pass

    def wait() -> None:
        if watched is not None:
            readable([watched], math.inf)
        while watched is None and os.path.exists(f"/proc/{pid}"):
            time.sleep(_LOOKS_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="mt-resilient", daemon=True).start()


def parent_of(pid: int) -> int:
    """Return the pid of the process's parent. Return 0 if it is unknown, or outside of this pid namespace."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def may_die_with_parent() -> bool:
    """Whether the kernel lets a process ask for SIGKILL at its parent's end. The test does not change this process's own setting."""
    now = ctypes.c_int()
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return prctl(_PR_GET_PDEATHSIG, ctypes.byref(now), 0, 0, 0) == 0 == prctl(_PR_SET_PDEATHSIG, now, 0, 0, 0)


def adopt_orphans() -> bool:
    """Make this process the parent of each descendant whose own parent dies (a child subreaper), so that it loses no descendant. Return
    whether the kernel did it."""
    return bool(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def spawn(command: Sequence[str], **popen: Any) -> subprocess.Popen[bytes]:
    """Return `subprocess.Popen(command, **popen)`, with a child that is killed when this process ends. Takes ~20 ms longer.

    Call `spawn` from a thread that lives as long as the agent: the kernel kills the child when the *thread* that spawned it ends.
    """
    leash = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
    return subprocess.Popen([*leash, *command], **popen)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    for number in (
        signal.SIGUSR1,
        signal.SIGUSR2,
    ):  # a scheduler may send them to all processes, but they are meant for the agent
        signal.signal(number, signal.SIG_IGN)
    for number in (
        signal.SIGPIPE,
        signal.SIGXFSZ,
    ):  # Python ignores these signals, and the command should not inherit that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        print(f"{sys.argv[2]}: {error.strerror}", file=sys.stderr)
        os._exit(127)
