"""Ranks that hang for real, in five ways: the one that does is named, all start again, and the run ends with the bits of the undisturbed
one. One that is only slow is left alone."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from mt_resilient.resilience.errors import ScriptError

from ..harness import GATED, HANGING, MINIMAL, ROOT, Job, digest_of, step_lines, undisturbed
from .test_visible import metrics_of

pytestmark = pytest.mark.timing

STEPS = 60
QUICK = ["--set", "hang.floor_s=2", "--set", "hang.confirm_s=1", "--set", "hang.idle_s=1"]
HUNG = 'mt_resilient_recoveries_total{cause="rank_hung",job="run",result="recovered",rung="2"}'
SUSPECTED = 'mt_resilient_suspected_hangs_total{job="run"}'


@pytest.fixture
def expected() -> tuple[str, list[str]]:
    return undisturbed(MINIMAL, "--steps", str(STEPS))


def hanging(place: Path, how: str, *options: str, after: int = 12, delay: str = "0.02", **extra: str) -> Job:
    """Rank 1 does `how` before its step `after`; the gate is before the 30th."""
    command = [
        "--nproc-per-node",
        "2",
        str(GATED),
        str(HANGING),
        str(MINIMAL),
        "--steps",
        str(STEPS),
        "--step-delay",
        delay,
    ]
    return Job(place, command, *QUICK, *options, HANG=f"{how}:1:{after}:{place / 'marker'}", **extra)


def same(job: Job, expected: tuple[str, list[str]]) -> None:
    assert job.finish() == 0, job.said()
    assert (digest_of(job.printed()), step_lines(job.printed())) == expected


@pytest.mark.parametrize(
    ("how", "where"),
    [
        pytest.param("sleep", "in sleeps_for_ever", marks=pytest.mark.variant),
        ("gil", "in keeps_the_gil"),
        pytest.param("loader", "in its data loader", marks=pytest.mark.variant),
        pytest.param("stop", "stopped by a signal", marks=pytest.mark.variant),
    ],
)
def test_a_rank_that_hangs_is_named_and_started_again(
    how: str, where: str, tmp_path: Path, expected: tuple[str, list[str]]
) -> None:
    job = hanging(tmp_path, how, delay="0.2")  # the metrics can be read for 10 s
    job.gate.touch()  # ranks that waited there for long would hang a second time
    job.until_said("recovered (rung 2")
    told = metrics_of(job)
    assert told[HUNG] == 1
    assert told[SUSPECTED] >= 1  # a busy machine may add one
    same(job, expected)
    (incident,) = job.faults()
    assert (incident.cause, incident.rung) == ("rank_hung", 2)
    assert incident.summary.startswith("rank 1 on ")
    assert where in incident.summary
    assert any("rank 0 on " in line and "waits for it" in line for line in incident.evidence)
    assert incident.lost_steps <= 2
    stacks = (job.directory / "logs" / "stacks-g1-step11.txt").read_text()
    assert "most recent call first" in stacks


@pytest.mark.variant
def test_of_ranks_in_different_collectives_each_is_named_with_its_call(
    tmp_path: Path, expected: tuple[str, list[str]]
) -> None:
    """gloo records its calls from torch 2.13 on."""
    job = hanging(tmp_path, "collective")
    job.until_said("recovered (rung 2")
    same(job, expected)
    (incident,) = job.faults()
    assert "flight recorder shows that the ranks differ at collective" in incident.summary
    assert "rank 1 called all_gather" in incident.summary


@pytest.mark.variant
def test_a_rank_that_computes_for_long_is_told_once_and_left_alone(
    tmp_path: Path, expected: tuple[str, list[str]]
) -> None:
    job = hanging(tmp_path, "busy", BUSY_S="9")
    job.until_said("the ranks give signs of life again")
    assert metrics_of(job)[HUNG] == 0
    assert metrics_of(job)[SUSPECTED] >= 1
    same(job, expected)
    assert job.faults() == []
    assert "slow, and not certain to hang: rank 1 is at chaos/hanging.py" in job.said()


def test_a_rank_that_evaluates_alone_is_waited_for(tmp_path: Path) -> None:
    script = str(ROOT / "tests" / "chaos" / "evaluates.py")
    job = Job(tmp_path, ["--nproc-per-node", "2", script], *QUICK, "--set", "hang.floor_s=5")
    assert job.agent.wait(300) == 0, job.said()
    assert "no sign of life" not in job.said()


def test_a_rank_that_uploads_while_the_others_wait_is_told_once_and_left_alone(tmp_path: Path) -> None:
    """As under torchrun, where the others wait as long."""
    options = ["--set", "hang.floor_s=5", "--set", "hang.confirm_s=1"]
    script = str(ROOT / "tests" / "chaos" / "evaluates.py")
    job = Job(tmp_path, ["--nproc-per-node", "2", script], *options, UPLOADS="1")
    assert job.agent.wait(300) == 0, job.said()
    assert job.said().count("this is allowed for 600 s (hang.idle_s)") == 1
    assert job.faults() == []


@pytest.mark.variant
def test_an_upload_that_was_taken_for_a_hang_is_waited_for_the_next_time(tmp_path: Path) -> None:
    script = str(ROOT / "tests" / "chaos" / "evaluates.py")
    job = Job(tmp_path, ["--nproc-per-node", "2", script], *QUICK, UPLOADS="1")
    assert job.agent.wait(400) == 0, job.said()
    (incident,) = job.faults()
    assert (incident.cause, incident.rung) == ("rank_hung", 2)
    assert "raise hang.floor_s and hang.idle_s" in incident.plan


@pytest.mark.variant
def test_where_nothing_is_to_be_done_nothing_is(tmp_path: Path, expected: tuple[str, list[str]]) -> None:
    job = hanging(tmp_path, "stop", "--set", "hang.act=false")
    job.until_said("hang.act is off, so the agent does nothing")
    time.sleep(3)
    assert job.faults() == []
    now = job.until_step(11)
    os.kill(now.pids[1], signal.SIGCONT)
    job.until_said("the ranks give signs of life again")
    same(job, expected)


@pytest.mark.variant
def test_an_agent_that_stands_still_blames_nobody(tmp_path: Path, expected: tuple[str, list[str]]) -> None:
    """Agent and ranks are stopped for longer than a step may take, and go on."""
    job = hanging(tmp_path, "busy", BUSY_S="0")
    now = job.until_step(20)
    job.gate.touch()
    for pid in (job.agent.pid, *now.pids):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(6)
    for pid in (job.agent.pid, *now.pids):
        os.kill(pid, signal.SIGCONT)
    same(job, expected)
    assert job.faults() == []


@pytest.mark.variant
def test_one_that_hangs_while_it_starts_twice_is_the_script_s_own_error(tmp_path: Path) -> None:
    command = ["--nproc-per-node", "2", str(ROOT / "tests" / "chaos" / "starts_never.py")]
    job = Job(tmp_path, command, *QUICK, "--set", "hang.start_s=3")
    assert job.agent.wait(120) == ScriptError.exit_code, job.said()
    assert [incident.cause for incident in job.faults()] == ["rank_hung", "rank_hung"]
    assert all("rank 1 on" in incident.summary for incident in job.faults())


@pytest.mark.variant
def test_a_teardown_that_hangs_is_ended_and_the_job_has_finished(tmp_path: Path) -> None:
    command = ["--nproc-per-node", "2", str(ROOT / "tests" / "chaos" / "ends_never.py")]
    job = Job(tmp_path, command, *QUICK, "--set", "hang.teardown_s=3")
    assert job.agent.wait(300) == 0, job.said()
    assert job.faults() == []
    assert "the training is over, but its ranks do not end" in job.said()
    assert (job.directory / "finished").exists()
    there = psutil.process_iter(["cmdline"])  # without those that end meanwhile
    assert not [p for p in there if str(job.directory) in " ".join(p.info["cmdline"] or ())]
