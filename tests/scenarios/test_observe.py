"""Episodes with `--observe`: everything is told, and nothing is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mt_resilient.resilience.inprocess.loss_spike import SpikePolicy
from mt_resilient.resilience.inprocess.rewind_ladder import LadderPolicy
from mt_resilient.resilience.inprocess.tally import RankPolicy

from .cluster import Job

Golden = Callable[[str], None]


def observed(**faults: Any) -> Job:
    spikes, ladder = SpikePolicy(baseline_steps=16, patience_steps=4), LadderPolicy(same_fault_steps=4)
    return Job(judged_by=RankPolicy(spikes=spikes, ladder=ladder, observe=True), **faults)


def goes_on(job: Job) -> None:
    """No step is computed twice, no generation follows the first, and every incident says what would have been done."""
    job.ends()
    assert job.computed == job.total
    assert job.lives == 1
    assert {incident.generation for incident in job.incidents.values()} == {1}
    assert all(incident.would is not None and not incident.open for incident in job.incidents.values())


def test_observed_nan(golden: Golden) -> None:
    """NaN in three steps of four, then again much later: two faults, not four; the ranks go on."""
    job = observed(nan_at={3: 1, 4: 1, 6: 1, 14: 1}, total=20)
    goes_on(job)
    assert job.causes == ["non_finite"] * 2
    golden(job.transcript())


def test_observed_hang(golden: Golden) -> None:
    """Rank 1 hangs, which is told; after a while it goes on by itself, and so does the job."""
    job = observed(hang_at={5: 1})
    job.until(lambda job: bool(job.incidents))
    job.wait(3)
    job.ranks.hung = False
    goes_on(job)
    golden(job.transcript())


def test_observed_flip(golden: Golden) -> None:
    """A bit flips in a replica: told once, although each later state is wrong; what is on disk of them is marked."""
    job = observed(flip_at={5: 1}, ranks=3)
    goes_on(job)
    assert len(job.incidents) == 1
    assert job.rejected
    golden(job.transcript())


def test_observed_death(golden: Golden) -> None:
    """A rank is killed: the launcher ends by itself, and the job with it, with the launcher's exit code."""
    job = observed()
    job.until_step(5)
    job.kill_rank(1)
    job.ends(1)
    (incident,) = job.incidents.values()
    assert (incident.cause, incident.would, incident.open) == ("rank_killed", 2, False)
    golden(job.transcript())
