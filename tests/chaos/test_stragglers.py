"""Ranks that are slowed for real: who is slow by itself is told, and where its time goes; what slows all alike accuses nobody."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from ..harness import Job, cli
from .test_visible import metrics_of

SLOWED = Path(__file__).with_name("slowed.py")
QUICK = (
    "stragglers.sample_s=0.5",
    "stragglers.window_samples=5",
    "stragglers.baseline_samples=20",
    "stragglers.shift=0.5",  # the tests' machine has other things to do
    "spikes.enabled=false",
)
STRAGGLERS = 'mt_resilient_stragglers{job="run"}'
BUSY = "import os; os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[1]})\nwhile True: pass"


def test_a_slow_rank_is_told_and_what_slows_all_is_not(tmp_path: Path) -> None:
    """One life of the ranks, seven moods: calm, all slower, a slow link, then three ways in which rank 1 alone is slow, and calm again."""
    mood = tmp_path / "mood"
    mood.write_text("")
    options = [word for value in QUICK for word in ("--set", value)]
    job = Job(
        tmp_path,
        ["--nproc-per-node", "2", str(SLOWED)],
        "--no-warm",
        "--durable-every",
        "1000000",
        *options,
        MOOD=str(mood),
    )
    job.until_step(5)
    for calm in ("", "all", "link", ""):
        mood.write_text(calm)
        time.sleep(15 if calm == "" else 8)
        assert "has become slow" not in job.said(), f"{calm}: {job.said()}"
    for how, where in (
        ("work", ""),  # it computes for longer, or waits for a processor, where others load the machine, too
        ("loader", "it sleeps"),
        ("neighbour", "waits for a processor"),
    ):
        neighbour = subprocess.Popen([sys.executable, "-c", BUSY]) if how == "neighbour" else None
        mood.write_text(how)
        before = len(job.incidents())
        job.until(lambda now: bool(now.stragglers))
        time.sleep(2)
        assert metrics_of(job)[STRAGGLERS] == 1
        incident = job.incidents()[before]
        assert (incident.cause, incident.rung, incident.open) == ("straggler", 0, True)
        assert "rank 1" in incident.summary
        assert where in incident.evidence[-1], incident
        mood.write_text("")
        if neighbour:
            neighbour.kill()
            neighbour.wait()
        job.until(lambda now: not now.stragglers)
        time.sleep(12)
    assert [i.cause for i in job.incidents()] == ["straggler"] * 3, job.said()
    mood.write_text("end")
    assert job.finish() == 0, job.said()
    assert "rank 1" in cli("explain", "--run-dir", str(job.directory)).stdout
