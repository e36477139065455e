"""What every test leaves behind: nothing."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")

MARK = "MT_RESILIENT_TEST"
"""Environment variable that every process started by a test inherits, however far down."""


def marked(mark: str) -> list[str]:
    """Command lines of the living processes that carry `mark`, this one excepted."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes():
                found.append(f"{process.name}: " + (process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


_NAMED_BY_RANKS = ("mt-resilient", "torch_", "__KMP_REGISTERED_LIB_")
"""What we and our ranks may leave in shared memory. Other programs use it too, at the same time, so no other name is counted."""


@pytest.fixture(autouse=True)
def nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No orphan process (and so no socket), no file in shared memory, after any test."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    before = set(os.listdir("/dev/shm"))
    yield
    deadline = time.monotonic() + 10  # a drain process whose parent is gone first finishes what it has
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"processes left behind: {left}"
    shared = {name for name in set(os.listdir("/dev/shm")) - before if name.startswith(_NAMED_BY_RANKS)}
    assert not shared, f"files left in /dev/shm: {shared}"
