"""How a process ended: a pidfd to wait on, and, from Linux 6.15 on, the exit code of a process that somebody else has reaped."""

from __future__ import annotations

import fcntl
import os
import struct

_PIDFD_INFO = struct.Struct("<QQ11Ii")  # struct pidfd_info: mask, cgroup id, eleven ids, exit code
_PIDFD_GET_INFO = (3 << 30) | (_PIDFD_INFO.size << 16) | (0xFF << 8) | 11  # _IOWR(0xFF, 11, struct pidfd_info)
_PIDFD_INFO_EXIT = 1 << 3


def open_pidfd(pid: int) -> int | None:
    """None when there is no such process any more."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def exit_code(pidfd: int) -> int | None:
    """Exit code of an ended process, negative for a signal; None where the kernel does not tell (yet)."""
    buffer = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, buffer)
    except OSError:
        return None
    mask, *_, status = _PIDFD_INFO.unpack(buffer)
    return os.waitstatus_to_exitcode(status) if mask & _PIDFD_INFO_EXIT else None
