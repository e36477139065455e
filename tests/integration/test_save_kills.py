"""Ranks, drain process and agent killed while they save: what is on disk is one step, to the bit, whatever was hit and when."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.checkpoint.durable import catalog

PROGRAM = Path(__file__).with_name("save_kills.py")
SMALL, LARGE = 1_500_000, 17 << 20
"""Bytes of a rank's state. Small slabs are tensorstore's; large ones are several requests of the direct stream, which a limit that is
none makes their writer."""
JOBS = {
    "tensorstore": (65, SMALL, 0.0),
    "direct": (35, LARGE, 1e5),
    "tensorstore, too": (65, SMALL, 0.0),
    "direct, too": (35, LARGE, 1e5),
}
"""Kills, bytes, MB a second."""
LEAST_HITS = {"rank": 4, "rank, half sealed": 10, "drain": 10, "drain, taken up again": 5, "agent": 10}
"""Of kills that came amid a write; far fewer than there are, so that a loaded machine does not fail the test."""


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("share", [0.05, pytest.param(1.0, marks=pytest.mark.variant)])
def test_200_kills_at_random_moments_of_a_save(share: float, tmp_path: Path) -> None:
    running = {}
    for seed, (name, job) in enumerate(JOBS.items(), 1):
        words = [str(tmp_path / name), str(seed), *map(str, (round(job[0] * share), *job[1:]))]
        command = [sys.executable, str(PROGRAM), *words]
        running[name] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said = {name: process.communicate(timeout=240) for name, process in running.items()}
    kills: Counter[str] = Counter()
    hits: Counter[str] = Counter()
    for name, (output, errors) in said.items():
        assert running[name].returncode == 0, f"{name}: {errors[-3000:]}"
        kills.update(json.loads(output)["kills"])
        hits.update(json.loads(output)["hits"])
        assert catalog.verify(catalog.committed(Files(tmp_path / name))[0]) == []
    assert kills.total() >= 200 * share
    assert all(hits[target] >= round(least * share) for target, least in LEAST_HITS.items()), hits
    print(f"{dict(kills)}, of which amid a write {dict(hits)}")
