"""The drain process ends if the clock of the day is set back, because tensorstore would begin no write until it has caught up."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mt_resilient.chaos.live import clock
from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.resilience.errors import MachineError

from ..played import PATIENCE_S, Node


@pytest.mark.skipif(not clock.possible(), reason="a C compiler and x86-64 are wanted")
def test_the_drain_process_ends_when_the_clock_is_set_back_amid_a_write(tmp_path: Path) -> None:
    file, node = tmp_path / "clock", Node(Files(tmp_path / "root"))
    try:
        words = [f"{name}={word}" for name, word in clock.variables(clock.built(tmp_path), file).items()]
        node.snapshot(1)
        writing = node.drain(["env", *words], max_write_mb_per_s=0.002).process  # for 100 s
        ends_s = time.monotonic() + PATIENCE_S
        while not any((tmp_path / "root").rglob("zarr.json")):
            assert time.monotonic() < ends_s
            time.sleep(0.01)
        for ahead_s in (0.5, 0.0, 300.0, 299.5):
            clock.put(file, ahead_s)
            time.sleep(1.2)
            assert writing.poll() is None, ahead_s
        clock.put(file, 0.0)
        assert writing.wait(PATIENCE_S) == MachineError.exit_code
        assert node.drain().events("durable")[-1]["step"] == 1
    finally:
        node.close()
