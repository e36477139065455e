"""Reads what the kernel reports: processes that the OOM killer has killed, and drivers' complaints. It reads each message once.

It reads `/dev/kmsg` if that is allowed (for root, and not in every container). It always reads the OOM killer's counters.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from ...checkpoint.arena import memory_limits
from ...resilience.ipc.file_descriptors import high

_KILLED = re.compile(r"Killed process (\d+)")


class KernelLog:
    def __init__(self, root: Path = Path("/")) -> None:
        """Start reading at the present end of the log. root: the directory that contains proc/, sys/ and dev/."""
        self._root = root
        self._kills = memory_limits.oom_kills(root)
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

    def out_of_memory(self, lines: list[str]) -> tuple[bool, set[int]]:
        """Return whether the OOM killer has killed a process since the last call, and the killed pids that `lines` (of the log) name."""
        before, self._kills = self._kills, memory_limits.oom_kills(self._root)
        named = {int(pid) for line in lines for pid in _KILLED.findall(line)}
        return self._kills > before or bool(named), named
