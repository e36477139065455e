"""Shared memory in files without a name, mapped without an open descriptor. Python's `mmap` would keep a duplicate of the descriptor, under
the lowest free number."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import tempfile
import weakref
from contextlib import suppress

from .file_descriptors import high

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


LASTING = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
"""Seals after which no process can shrink the file: otherwise, accesses in other processes' mappings would fault."""


def memory(name: str, nbytes: int = 0, seals: int = LASTING) -> int:
    """Return the descriptor of a new file of `nbytes` bytes in memory. The file exists until no process has it open or mapped. If the
    kernel refuses, the file is in /dev/shm or among the temporary files, without seals. Raises OSError."""
    try:
        fd = high(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except (OSError, AttributeError):
        fd = high(_unnamed())
    os.ftruncate(fd, nbytes)
    with suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def _unnamed() -> int:
    with suppress(OSError):
        return os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fd, path = tempfile.mkstemp(prefix="mt-resilient-")
    os.unlink(path)
    return fd


def mapped(fd: int, nbytes: int, offset: int = 0, *, writable: bool = True, populate: bool = False) -> memoryview:
    """Return a view of `nbytes` bytes of the file, which must have that many. All processes that map these bytes share them. They are
    unmapped with the last view. Raises OSError."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
    address = _libc.mmap(None, nbytes, protection, flags, fd, offset)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    block = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(
        block, _libc.munmap, address, nbytes
    ).atexit = False  # code that runs at exit may still write there
    view = memoryview(block).cast("B")
    return view if writable else view.toreadonly()
