"""Waits for a process that is not the agent's child: provides a descriptor to wait on, and the exit code that the kernel keeps.

The descriptor is a pidfd. If the kernel refuses pidfds, it is a pipe that a thread closes after polling /proc. Until its parent reaps the
process, `/proc/<pid>/stat` contains the exit code (field 52, any Linux). Afterwards, from Linux 6.15 on, the pidfd provides the code.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import threading
from contextlib import suppress
from pathlib import Path

from ...resilience.clock import sleep
from ...resilience.ipc.file_descriptors import high
from ...resilience.store.poll import readable

LOOK_S = 0.02
"""Seconds between two polls of /proc. torchrun reaps its ranks ten times a second, and reaping removes the exit code."""
KILLED_S = 0.05
"""Seconds between two polls for killed ranks. A poll takes 40 us for each process."""

_PF_EXITING = 4
"""The kernel's flag of a thread that is exiting, and runs its program no more."""
_PIDFD_INFO = struct.Struct("<QQ11Ii")  # struct pidfd_info: mask, cgroup id, eleven ids, exit code
_PIDFD_GET_INFO = (3 << 30) | (_PIDFD_INFO.size << 16) | (0xFF << 8) | 11  # _IOWR(0xFF, 11, struct pidfd_info)
_PIDFD_INFO_EXIT = 1 << 3


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process has ended. None: the process does not exist any more."""
    try:
        return high(os.pidfd_open(pid))
    except ProcessLookupError:
        return None
    except (OSError, AttributeError):
        return looked_at(pid)


def looked_at(pid: int, every_s: float = LOOK_S) -> int | None:
    """Return a descriptor as `open_pidfd` does, but without a pidfd: a pipe that a polling thread closes when the process has ended, or is
    `killed`. Raises OSError or RuntimeError if no descriptor or thread is left."""
    if not os.path.exists(f"/proc/{pid}"):
        return None
    since = born(pid)
    reading, writing = map(high, os.pipe2(os.O_CLOEXEC))

    def look() -> None:
        while since and born(pid) == since and killed(pid) is None:
            sleep(every_s)
        os.close(writing)

    try:
        threading.Thread(target=look, name=f"looks at {pid}", daemon=True).start()
    except RuntimeError:
        os.close(reading)
        os.close(writing)
        raise
    return reading


def send(pid: int, pidfd: int, number: int) -> None:
    """Send a signal to the process, unless it has ended."""
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        pass
    except (OSError, AttributeError):
        with suppress(ProcessLookupError):
            if not readable([pidfd]):
                os.kill(pid, number)


def born(pid: int) -> str:
    """Return the start time of the process, as text from /proc. Pid and start time together identify a process, because the kernel reuses
    pids. Empty: the process does not exist, or is dead and not reaped. While some of its threads still end, the kernel has no exit code, so
    the process counts as alive."""
    try:
        state, *fields = _stat(pid)
    except OSError:
        return ""
    threads = int(fields[16])
    return "" if state == "X" or (state == "Z" and threads <= 1) else fields[18]


def exit_code(pid: int, pidfd: int) -> int | None:
    """Return the exit code of the ended process, negative for a signal; None if the kernel no longer has it."""
    status = _of_zombie(pid)
    if status is None:
        status = _of_pidfd(pidfd)
    return None if status is None else os.waitstatus_to_exitcode(status)


def killed(pid: int) -> int | None:
    """Return the exit code of a process that a signal has killed and that the kernel is still taking down: its program runs no more. None:
    there is no such process. Taking down a process that has registered 20 GB of memory with a device takes more than half a second
    (measured), and the pidfd becomes readable only afterwards."""
    with suppress(OSError):
        status = _status_of_killed(_stat(pid))
        threads = os.listdir(f"/proc/{pid}/task") if status else ()
        if threads and all(_status_of_killed(_stat(f"{pid}/task/{each}")) for each in threads):
            return os.waitstatus_to_exitcode(status)
    return None


def _status_of_killed(fields: list[str]) -> int:
    """Return the wait status of a thread that ends by a signal; otherwise 0."""
    status = int(fields[49])  # flags are field 9, exit_code is field 52
    return status if int(fields[6]) & _PF_EXITING and os.WIFSIGNALED(status) else 0


def _stat(process: object) -> list[str]:
    """Return the fields of `/proc/<process>/stat` from field 3 on. Field 2, the name, may contain any bytes."""
    return Path(f"/proc/{process}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()


def _of_zombie(pid: int) -> int | None:
    try:
        fields = _stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[49]) if fields[0] in "ZX" else None  # state is field 3, exit_code 52


def _of_pidfd(pidfd: int) -> int | None:
    buffer = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, buffer)
    except OSError:
        return None
    mask, *_, status = _PIDFD_INFO.unpack(buffer)
    return status if mask & _PIDFD_INFO_EXIT else None
