"""What `ps`, `pkill -f` and psutil see of this process: its command line and its environment, as the kernel shows them in /proc.

The kernel reads both from the process's own memory. A forked process shows its parent's until it has told the kernel of others.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_PLACES = {"start_code": 26, "end_code": 27, "start_stack": 28, "start_data": 45, "end_data": 46, "start_brk": 47}
_PLACES |= {"arg_start": 48, "arg_end": 49, "env_start": 50, "env_end": 51}
"""Fields of /proc/self/stat, numbered as in proc(5)."""
_kept: list[mmap.mmap] = []
"""The memory that the kernel reads: never freed."""


class _Map(ctypes.Structure):
    """`struct prctl_mm_map` of linux/prctl.h."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data", "start_brk", "brk")),
        *((name, ctypes.c_uint64) for name in ("start_stack", "arg_start", "arg_end", "env_start", "env_end", "auxv")),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


def show(arguments: Sequence[str] | None, environment: Mapping[str, str] | None) -> bool:
    """Show these instead; None: what has been shown so far. False where the kernel does not let us, as one built without
    CONFIG_CHECKPOINT_RESTORE."""
    fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    shown = _Map(**{name: int(fields[number - 3]) for name, number in _PLACES.items()})
    shown.brk, shown.exe_fd = libc.sbrk(0), 2**32 - 1
    if arguments is not None:
        shown.arg_start, shown.arg_end = _placed(arguments)
    if environment is not None:
        shown.env_start, shown.env_end = _placed([f"{name}={value}" for name, value in environment.items()])
    return libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(shown), ctypes.sizeof(shown), 0) == 0


def _placed(words: Sequence[str]) -> tuple[int, int]:
    """Where `words`, each with a NUL behind it, begin and end in memory."""
    text = b"".join(os.fsencode(word) + b"\0" for word in words) or b"\0"
    memory = mmap.mmap(-1, len(text), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(text)
    _kept.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return start, start + len(text)
