"""Memory of snapshots that grows, in huge pages where the kernel can."""

import ctypes
import errno
import os
from pathlib import Path

import pytest

from mt_resilient.resilience.ipc.shared_memory import LASTING, allocate, allocated, mapped, memory

MIB = 1 << 20


def test_it_grows_and_keeps_what_is_there() -> None:
    fd = memory("grows")
    try:
        for nbytes in (4096, 3 * MIB + 4096, 9 * MIB, 9 * MIB, 10 * MIB + 8192):
            allocate(fd, nbytes)
            assert os.fstat(fd).st_size == nbytes
            assert allocated(fd) == nbytes
            view = mapped(fd, nbytes)
            kept = len(bytes(view).rstrip(b"\0"))
            assert bytes(view[:kept]) == b"x" * kept
            view[:] = b"x" * nbytes
            assert nbytes < 2 * MIB or ctypes.addressof(ctypes.c_char.from_buffer(view)) % (2 * MIB) == 0
    finally:
        os.close(fd)


def test_what_failed_midway_counts_as_missing() -> None:
    fd = memory("failed")
    try:
        allocate(fd, MIB)
        os.ftruncate(fd, 4 * MIB)
        assert MIB <= allocated(fd) < 4 * MIB  # the kernel may take a huge page of 2 MiB
    finally:
        os.close(fd)


@pytest.mark.parametrize(("seals", "left"), [(0, MIB), (LASTING, 6 * MIB + 1)])
def test_a_failure_leaves_the_former_length_if_the_file_may_shrink(
    monkeypatch: pytest.MonkeyPatch, seals: int, left: int
) -> None:
    def failing(fd: int, start: int, nbytes: int) -> None:
        if start >= 8 * MIB:
            raise OSError(errno.ENOSPC, "full")
        fallocate(fd, start, nbytes)

    fd, fallocate = memory("fails", seals=seals), os.posix_fallocate
    try:
        allocate(fd, MIB)
        monkeypatch.setattr(os, "posix_fallocate", failing)
        with pytest.raises(OSError, match="full"):
            allocate(fd, 12 * MIB)
        assert os.fstat(fd).st_size == left
    finally:
        os.close(fd)


def mappings() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


def test_a_refused_mapping_leaves_nothing_behind() -> None:
    before = len(mappings())
    for _ in range(200):
        with pytest.raises(OSError, match="descriptor"):
            mapped(-1, 4 * MIB)
    assert len(mappings()) < before + 100  # those of other tests come and go


def test_mappings_leave_nothing_behind() -> None:
    fd = memory("left")
    try:
        allocate(fd, 4 * MIB)
        mapped(fd, 4 * MIB)
        before = len(mappings())
        for _ in range(200):
            mapped(fd, 4 * MIB)
        assert len(mappings()) < before + 100
    finally:
        os.close(fd)
