"""A rank that the kernel kills for want of memory: told as what it is, and started again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..harness import MINIMAL, Job, cli, digest_of, undisturbed

HUNGRY = Path(__file__).with_name("hungry.py")
LIMIT = 256 << 20


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group that may have 256 MiB; where none can be made, there is nothing to be tested."""
    name = f"mt-resilient-test-{os.getpid()}"
    for top, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        path = Path(top) / name
        try:
            path.mkdir()
            (path / limit).write_text(str(LIMIT))
        except OSError:
            if path.exists():
                path.rmdir()
            continue
        yield path
        path.rmdir()
        return
    pytest.skip("no control group can be made here: it takes root, and a memory controller")


def test_a_rank_killed_for_want_of_memory(group: Path, tmp_path: Path) -> None:
    arguments = ["--steps", "60", "--step-delay", "0.02"]
    expected, _ = undisturbed(MINIMAL, "--steps", "60")
    command = ["--nproc-per-node", "2", str(HUNGRY), str(MINIMAL), *arguments]
    job = Job(tmp_path, command, GROUP=str(group), MARKER=str(tmp_path / "eaten"))
    assert job.finish() == 0, job.said()
    assert digest_of(job.printed()) == expected
    (incident,) = job.faults()
    assert (incident.cause, incident.rung) == ("rank_killed", 2)
    assert "rank 1" in incident.summary
    assert "OOM killer" in incident.summary, "that it was the victim is certain only where the kernel's log can be read"
    assert "counted no kill" not in cli("explain", "--run-dir", str(job.directory)).stdout
