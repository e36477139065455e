"""Shared memory, mapped without keeping a descriptor: Python's `mmap` keeps a duplicate of it, under the lowest number that is free."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


def mapped(fd: int, nbytes: int, offset: int = 0, *, writable: bool = True, populate: bool = False) -> memoryview:
    """Bytes of the file, which has as many, shared with all who map them; unmapped when nobody views them any more. Raises OSError."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
    address = _libc.mmap(None, nbytes, protection, flags, fd, offset)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    block = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(block, _libc.munmap, address, nbytes).atexit = False  # whoever ends last may still write there
    view = memoryview(block).cast("B")
    return view if writable else view.toreadonly()
