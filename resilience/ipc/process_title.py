"""Sets what `ps`, `pkill -f` and psutil show of this process: its command line and its environment, as in /proc.

The kernel reads both from the process's own memory. A forked process shows its parent's command line and environment until it gives the
kernel other addresses. The environment lies directly behind the command line, as in a process that was executed. C's `environ` points to
the environment: setproctitle finds both there, and writes there.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_PLACES = {"start_code": 26, "end_code": 27, "start_stack": 28, "start_data": 45, "end_data": 46, "start_brk": 47}
_PLACES |= {"arg_start": 48, "arg_end": 49, "env_start": 50, "env_end": 51}
"""Fields of /proc/self/stat, numbered as in proc(5)."""


class _Map(ctypes.Structure):
    """`struct prctl_mm_map` of linux/prctl.h."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data", "start_brk", "brk")),
        *((name, ctypes.c_uint64) for name in ("start_stack", "arg_start", "arg_end", "env_start", "env_end", "auxv")),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


def show(arguments: Sequence[str] | None, environment: Mapping[str, str]) -> bool:
    """Show these arguments (None: keep those shown) and this environment, which must be the content of os.environ. Return False if the
    kernel refuses, as a kernel without CONFIG_CHECKPOINT_RESTORE does."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    shown = _Map(**{name: int(fields[number - 3]) for name, number in _PLACES.items()})
    before = Path("/proc/self/cmdline").read_bytes().split(b"\0")[:-1]
    words = before if arguments is None else [os.fsencode(word) for word in arguments]
    variables = [os.fsencode(f"{name}={value}") for name, value in environment.items()]
    text = b"".join(word + b"\0" for word in (*words, *variables))
    places = list(accumulate((len(word) + 1 for word in (*words, *variables)), initial=_lasting(libc, text)))
    shown.arg_start, shown.env_end = places[0], places[-1]
    shown.arg_end = shown.env_start = places[len(words)]
    shown.brk, shown.exe_fd = libc.sbrk(0), 2**32 - 1  # last: `_lasting` may have moved the break
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(shown), ctypes.sizeof(shown), 0):
        return False
    vector = (ctypes.c_void_p * (len(variables) + 1))(*places[len(words) : -1])
    ctypes.c_void_p.in_dll(libc, "environ").value = _lasting(libc, bytes(vector))
    return True


def show_instead(command: Sequence[str], other: Sequence[str]) -> None:
    """Show `other` instead of `command`, the last words of this process's command line. Do nothing if the command line does not end with
    `command`."""
    words = [os.fsdecode(word) for word in Path("/proc/self/cmdline").read_bytes().split(b"\0")[:-1]]
    if command and words[-len(command) :] == list(command):
        show([*words[: -len(command)], *other], os.environ)


def _lasting(libc: ctypes.CDLL, content: bytes) -> int:
    """Copy `content` into memory that is never freed, and return the address. The kernel reads this memory, and so does C code after Python
    has ended."""
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    address = int(libc.malloc(len(content)))
    ctypes.memmove(address, content, len(content))
    return address
