"""Becomes another program, to which the kernel refuses some system calls, as container runtimes have it.

`refusing.py NAME,NAME… PROGRAM ARGUMENTS…`
"""

import ctypes
import errno
import os
import platform
import struct
import sys

NUMBERS = {
    "x86_64": {"memfd_create": 319, "pidfd_open": 434, "pidfd_send_signal": 424, "prctl": 157},
    "aarch64": {"memfd_create": 279, "pidfd_open": 434, "pidfd_send_signal": 424, "prctl": 167},
}[platform.machine()]
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def main() -> None:
    names = sys.argv[1].split(",")
    lines = [(LOAD, 0, 0, 0)]  # the number of the call
    for at, name in enumerate(names):
        lines.append((JUMP_IF_EQUAL, len(names) - at, 0, NUMBERS[name]))
    lines += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ERRNO | errno.EPERM)]
    packed = b"".join(struct.pack("<HBBI", *line) for line in lines)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(Program(len(lines), packed)), 0, 0) == 0
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
