"""Reads what the kernel reports: processes that the OOM killer has killed, and drivers' complaints. It reads each message once.

The agent reads `/dev/kmsg` if that is allowed (for root, and not in every container). The agent always reads the OOM killer's counters. The
machine's counter does not tell which process was killed. So a rank counts as killed for lack of memory only if the log names its pid, or if
the log names no pid and the counter of the agent's own control group has risen.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from enum import Enum
from pathlib import Path

from ...checkpoint.arena import memory_limits
from ...resilience.ipc.file_descriptors import high

_KILLED = re.compile(r"Killed process (\d+)")
_RECENT_S = 10.0
"""A kill by the OOM killer counts as recent for at least this many seconds. A process may take seconds to end."""


class OutOfMemory(Enum):
    """Whether the OOM killer has killed a process."""

    NO = "no"
    PERHAPS = "perhaps"
    """The OOM killer has recently killed a process, and it is not known which one."""
    CERTAIN = "certain"


class KernelLog:
    def __init__(self, root: Path = Path("/")) -> None:
        """Start reading at the present end of the log. root: the directory that contains proc/, sys/ and dev/."""
        self._root = root
        self._kills = self._newer = memory_limits.oom_kills(root)
        self._counted_s = 0.0
        self._named: list[set[int]] = [set(), set()]
        """The pids that the log named recently, in two spans of _RECENT_S seconds."""
        self._fd = -1
        with suppress(OSError):
            self._fd = high(os.open(root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            os.lseek(self._fd, 0, os.SEEK_END)

    @property
    def readable(self) -> bool:
        return self._fd >= 0

    def news(self) -> list[str]:
        """Return the lines that were written to the log since the last call."""
        found: list[str] = []
        while self._fd >= 0:
            try:
                data = os.read(self._fd, 8192)
            except BlockingIOError:
                break
            except BrokenPipeError:  # unread lines are lost; the next read continues after them
                continue
            except OSError:
                break
            if not data:
                break
            found.append(data.decode(errors="replace").partition(";")[2].partition("\n")[0])
        return found

    def hear(self, lines: list[str], now_s: float) -> None:
        """Remember the OOM killer's kills that `lines` (of the log) name. Forget kills that are not recent. now_s: monotonic."""
        if now_s - self._counted_s >= _RECENT_S:
            self._kills, self._newer, self._counted_s = self._newer, memory_limits.oom_kills(self._root), now_s
            self._named = [self._named[1], set()]
        self._named[1].update(int(pid) for line in lines for pid in _KILLED.findall(line))

    def out_of_memory(self, pid: int) -> OutOfMemory:
        """Return whether the OOM killer has killed this process, which SIGKILL has just ended."""
        own, machine = (
            now > before for now, before in zip(memory_limits.oom_kills(self._root), self._kills, strict=True)
        )
        named = set().union(*self._named)
        if pid in named or (own and not named):
            return OutOfMemory.CERTAIN
        return OutOfMemory.PERHAPS if own or machine or named else OutOfMemory.NO
