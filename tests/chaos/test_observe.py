"""`--observe`: what goes wrong for real is judged and told as ever, and the training ends as it would have by itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from mt_resilient.agent.cli import explain
from mt_resilient.agent.run_directory import RunDirectory
from mt_resilient.checkpoint.backend.paths import CERTIFIED, Attempt
from mt_resilient.checkpoint.durable import catalog

from ..harness import GATED, MINIMAL, Job, cli, digest_of, undisturbed

SPIKING = Path(__file__).with_name("spiking.py")


@pytest.mark.variant
def test_a_hang_and_a_spike_are_told_and_the_ranks_go_on(tmp_path: Path) -> None:
    """The state is damaged for good at step 40: with us the ranks would go back. The bits are those of plain torchrun, hit alike."""
    arguments = ["--steps", "80"]
    hurt = {"HURT": "parameter@40"}
    expected, _ = undisturbed(SPIKING, *arguments, MARKER=str(tmp_path / "alone"), **hurt)
    options = ["--observe", "--durable-every", "8"]
    for value in (
        "spikes.baseline_steps=16",
        "spikes.patience_steps=4",
        "stability.certify_after_steps=6",
        "hang.floor_s=2",
        "hang.confirm_s=1",
    ):
        options += ["--set", value]
    command = ["--nproc-per-node", "2", str(GATED), str(SPIKING), *arguments]
    job = Job(tmp_path, command, *options, MARKER=str(tmp_path / "hurt"), **hurt)
    job.until_step(20)
    pid = job.until(lambda now: bool(now.pids) and all(now.pids)).pids[1]
    os.kill(pid, signal.SIGSTOP)
    job.until_said("the program only observes and did nothing")
    os.kill(pid, signal.SIGCONT)
    assert job.finish() == 0, job.said()
    assert digest_of(job.printed()) == expected
    told = [(i.cause, i.rung, i.would, i.open) for i in job.faults()]
    assert told == [("rank_hung", 0, 2, False), ("loss_divergence", 0, 1, False)], job.said()
    assert job.faults()[1].onset == 41
    assert not [line for line in job.said().splitlines() if "going back" in line or "generation 2" in line]
    certified = [
        snapshot for snapshot in catalog.committed(RunDirectory(job.directory).kept()) if snapshot.there(CERTIFIED)
    ]
    steps = [attempt.stamp.step for snapshot in certified if (attempt := Attempt.parse(snapshot.name))]
    assert all(step + 6 < 41 for step in steps), "a state known to be wrong, or just before it, is not certified"
    story = cli("explain", "--run-dir", str(job.directory)).stdout
    assert "loss divergence, which rung 1, rewind in place would answer" in story


@pytest.mark.variant
def test_a_killed_rank_ends_the_job_as_it_would_end_by_itself(tmp_path: Path) -> None:
    """Given again, the command begins as the script does, whatever has been kept."""
    command = ["--nproc-per-node", "2", str(GATED), str(MINIMAL), "--steps", "60", "--step-delay", "0.02"]
    job = Job(tmp_path, command, "--observe", "--durable-every", "10")
    job.until_said("step 20 is on disk")
    job.kill_rank(1)
    assert job.agent.wait(60) == 1, job.said()  # torchrun's own
    (incident,) = explain.incidents(RunDirectory(job.directory)).values()
    assert (incident.cause, incident.rung, incident.would, incident.generation) == ("rank_killed", 0, 2, 1)
    assert "rank 1" in incident.summary
    job.start()
    job.until_said("2 ranks start from the script's own start")
    assert job.finish() == 0, job.said()
    assert len(job.faults()) == 1
