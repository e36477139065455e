"""Ranks that are slowed for real: who is slow by itself is told, and where its time goes; what slows all alike accuses nobody."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mt_resilient.resilience.model.incident import Incident

from ..harness import Job, cli
from .test_visible import metrics_of

pytestmark = pytest.mark.timing

SLOWED = Path(__file__).with_name("slowed.py")
QUICK = (
    "stragglers.sample_s=0.5",
    "stragglers.window_samples=4",
    "stragglers.baseline_samples=16",
    "stragglers.shift=0.5",  # the tests' machine has other things to do
    "spikes.enabled=false",
)
NEIGHBOUR = "waits for a processor"
WAYS = {"work": "", "loader": "it sleeps"}
"""Of work one cannot be certain: on a machine with other things to do, who computes for longer queues for longer."""
STRAGGLERS = 'mt_resilient_stragglers{job="run"}'


def test_a_slow_rank_is_told_and_what_slows_all_is_not(tmp_path: Path) -> None:
    """One life, six moods: calm, all slower, a slow link, then two ways in which rank 1 alone is slow, each with calm after it.
    (A third, somebody else on its core, makes both ranks slow where there are two cores: all that had shared it moves to the other.)"""
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
    for calm, lasts_s in (("", 14), ("all", 6), ("link", 6)):
        mood.write_text(calm)
        for _ in range(5):  # what other programs take makes a rank slow by itself, and no figure shows every such case
            known = len(job.incidents())
            time.sleep(lasts_s)
            slow = [incident for incident in job.incidents()[known:] if NEIGHBOUR not in incident.evidence[-1]]
            if not slow:
                break
            job.until(lambda now: not now.stragglers)
        assert not slow, f"{calm}: {slow}"
    job.until(lambda now: not now.stragglers)
    for how, where in WAYS.items():
        mood.write_text(how)
        before = len(of_rank_1(job))
        job.until(lambda now: any(found.rank == 1 for found in now.stragglers))
        job.until(lambda now: metrics_of(job)[STRAGGLERS] >= 1)
        job.until(lambda _, before=before: len(of_rank_1(job)) > before)  # another thread writes the journal
        incident = of_rank_1(job)[before]
        assert (incident.cause, incident.rung) == ("straggler", 0)
        assert where in incident.evidence[-1], incident
        mood.write_text("")
        job.until(lambda now: not now.stragglers)
    mood.write_text("end")
    assert job.finish() == 0, job.said()
    assert "rank 1" in cli("explain", "--run-dir", str(job.directory)).stdout


def of_rank_1(job: Job) -> list[Incident]:
    """On a machine that is busy with other things, rank 0 may be slow, too: on the core that it has to stay on."""
    return [incident for incident in job.incidents() if "rank 1" in incident.summary]
