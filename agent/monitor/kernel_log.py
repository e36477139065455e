"""What the kernel says meanwhile: whom it has killed for want of memory, and what drivers complain of. Each word once.

`/dev/kmsg` where it may be read (root, and not in every container); the counters of the OOM killer always.
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
        """From now on. root: where proc/, sys/ and dev/ are."""
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
        """What has been written since the last call, a line each."""
        found: list[str] = []
        while self._fd >= 0:
            try:
                data = os.read(self._fd, 8192)
            except BlockingIOError:
                break
            except BrokenPipeError:  # what was not read in time is gone; the next read goes on behind it
                continue
            except OSError:
                break
            if not data:
                break
            found.append(data.decode(errors="replace").partition(";")[2].partition("\n")[0])
        return found

    def out_of_memory(self, lines: list[str]) -> tuple[bool, set[int]]:
        """Whether the OOM killer has killed somebody since the last call, and whom, as far as `lines` of the log tell."""
        before, self._kills = self._kills, memory_limits.oom_kills(self._root)
        named = {int(pid) for line in lines for pid in _KILLED.findall(line)}
        return self._kills > before or bool(named), named
