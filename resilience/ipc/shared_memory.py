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
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED, _MADV_COLLAPSE = 0x10, 25
_HUGE_BYTES = 2 << 20
"""A huge page. On other processors than x86 it may be larger: then the kernel refuses, and small pages remain."""

LASTING = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
"""Seals after which no process can shrink the file: otherwise, accesses in other processes' mappings would fault."""


def memory(name: str, nbytes: int = 0, seals: int = LASTING) -> int:
    """Return the descriptor of a new file of `nbytes` bytes in memory. The file exists until no process has it open or mapped. If the
    kernel refuses memfds, the file is created in /dev/shm, or else in the directory for temporary files, and has no seals. Raises
    OSError."""
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


def allocate(fd: int, nbytes: int) -> None:
    """Give the file memory for `nbytes` bytes, in huge pages where the kernel can (6.1). Memory pages that the file already has stay as
    they are. A device driver needs a tenth of the time to register and to release huge pages. Raises OSError. The file then keeps its
    former length, if its seals allow that."""
    there = os.fstat(fd).st_size
    try:
        _allocate(fd, there, nbytes)
    except OSError:
        with suppress(OSError):
            os.ftruncate(fd, there)
        raise


def _allocate(fd: int, there: int, nbytes: int) -> None:
    starts = range(-(-there // _HUGE_BYTES) * _HUGE_BYTES, nbytes - _HUGE_BYTES + 1, _HUGE_BYTES)
    for start in starts:
        os.posix_fallocate(fd, start, 1)  # the kernel makes a huge page only of a range with at least one page
    if starts:
        view = mapped(fd, nbytes)
        _libc.madvise(
            ctypes.addressof(ctypes.c_char.from_buffer(view)) + starts[0], len(starts) * _HUGE_BYTES, _MADV_COLLAPSE
        )
    os.posix_fallocate(fd, 0, nbytes)


def allocated(fd: int) -> int:
    """Return how many bytes of the file have memory. `allocate` may have failed midway."""
    found = os.fstat(fd)
    return min(found.st_size, found.st_blocks * 512) if found.st_blocks else found.st_size


def mapped(fd: int, nbytes: int, offset: int = 0, *, writable: bool = True, populate: bool = False) -> memoryview:
    """Return a view of `nbytes` bytes of the file, which must have that many. All processes that map these bytes share them. The mapping
    ends with the last view of the bytes. Raises OSError."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
    place = _room(nbytes) if nbytes >= _HUGE_BYTES else None
    try:
        address = _map(place, nbytes, protection, flags | (_MAP_FIXED if place else 0), fd, offset)
    except OSError:
        if place:
            _libc.munmap(place, nbytes)
        raise
    block = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(
        block, _libc.munmap, address, nbytes
    ).atexit = False  # code that runs at exit may still write there
    view = memoryview(block).cast("B")
    return view if writable else view.toreadonly()


def _room(nbytes: int) -> int:
    """Return an unused address at which a mapping of so many bytes can have huge pages. The bytes stay reserved until `_map` puts a mapping
    there."""
    nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    found = _map(None, nbytes + _HUGE_BYTES, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)  # no access
    place = -(-found // _HUGE_BYTES) * _HUGE_BYTES
    for start, end in ((found, place), (place + nbytes, found + nbytes + _HUGE_BYTES)):
        if end > start:
            _libc.munmap(start, end - start)
    return place


def _map(place: int | None, nbytes: int, protection: int, flags: int, fd: int, offset: int) -> int:
    address = _libc.mmap(place, nbytes, protection, flags, fd, offset)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(address)
