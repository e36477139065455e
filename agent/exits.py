"""How a process ended, though it is not our child: a pidfd to wait on, and the exit code from where the kernel keeps it.

Until its parent reaps it, `/proc/<pid>/stat` has it (field 52, any Linux); afterwards, from Linux 6.15 on, its pidfd.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

_PIDFD_INFO = struct.Struct("<QQ11Ii")  # struct pidfd_info: mask, cgroup id, eleven ids, exit code
_PIDFD_GET_INFO = (3 << 30) | (_PIDFD_INFO.size << 16) | (0xFF << 8) | 11  # _IOWR(0xFF, 11, struct pidfd_info)
_PIDFD_INFO_EXIT = 1 << 3


def open_pidfd(pid: int) -> int | None:
    """None when there is no such process any more."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def exit_code(pid: int, pidfd: int) -> int | None:
    """Exit code of the ended process, negative for a signal; None where the kernel does not tell."""
    status = _of_zombie(pid)
    if status is None:
        status = _of_pidfd(pidfd)
    return None if status is None else os.waitstatus_to_exitcode(status)


def _of_zombie(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
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
