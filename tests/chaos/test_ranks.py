"""Ranks killed and poisoned for real: the run ends with the bits of the undisturbed one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ..harness import FSDP, GATED, GPT, MINIMAL, Job, digest_of, some_of, step_lines, undisturbed

STEPS = 120
LAYOUTS = {
    "dp2": [],
    "tp2": ["--tp", "2"],
    "pp2": ["--pp", "2"],
    "ep2": ["--ep", "2", "--moe"],
}


@pytest.fixture
def expected() -> tuple[str, list[str]]:
    return undisturbed(MINIMAL, "--steps", str(STEPS))


def minimal(place: Path, *options: str) -> Job:
    command = ["--nproc-per-node", "2", str(GATED), str(MINIMAL), "--steps", str(STEPS), "--step-delay", "0.02"]
    return Job(place, command, "--durable-every", "10", *options)


def same(job: Job, expected: tuple[str, list[str]]) -> None:
    assert job.finish() == 0, job.said()
    assert (digest_of(job.printed()), step_lines(job.printed())) == expected


def test_killed_again_and_again_and_no_bit_is_lost(tmp_path: Path, expected: tuple[str, list[str]]) -> None:
    job = minimal(tmp_path, "--durable-every", "1000")  # a slot that is written to disk takes no newer snapshot
    job.until_said("the warm process is ready")
    job.until_step(29)
    for generation, rank in enumerate((1, 0, 0), 1):
        job.until(lambda now, g=generation: now.generation == g and now.stepped_s > 0 and all(now.pids))
        job.kill_rank(rank)
    same(job, expected)
    incidents = job.faults()
    assert [(i.cause, i.rung, i.launch) for i in incidents] == [("rank_killed", 2, "warm")] * 3
    first, last = incidents[0], incidents[-1]
    assert "rank 1" in first.summary
    assert "signal 9" in first.summary
    assert first.lost_steps <= 2, (
        "it was at the gate; where ranks run and the machine is busy, a snapshot may be left out"
    )
    assert list(last.phases_s) == ["detect", "stop", "start", "build", "restore", "step", "replay"]
    assert not last.open


@pytest.mark.variant
def test_killed_while_the_data_is_away(tmp_path: Path, expected: tuple[str, list[str]]) -> None:
    """No start goes well until it is back; starts wait longer and longer, and budgets of what comes next are whole."""
    data = tmp_path / "train.bin"
    data.touch()
    reading = tmp_path / "reading.py"
    reading.write_text(
        "import runpy, sys\nopen(sys.argv.pop(1))\nsys.argv.pop(0)\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    command = ["--nproc-per-node", "2", str(reading), str(data), str(GATED), str(MINIMAL)]
    job = Job(tmp_path, [*command, "--steps", str(STEPS), "--step-delay", "0.02"], "--durable-every", "10")
    job.until_step(20)
    data.rename(tmp_path / "away")
    job.kill_rank(1)
    job.until_said(
        "3 starts in a row have failed before the first step, although the job has trained before; the next start is in 5 s"
    )
    (tmp_path / "away").rename(data)
    job.until_step(40)
    job.kill_rank(0)
    same(job, expected)
    incidents = job.faults()
    assert [i.cause for i in incidents] == ["rank_killed", *["script_raised"] * 3, "rank_killed"], job.said()
    assert "FileNotFoundError" in incidents[1].summary
    assert incidents[3].phases_s["stop"] >= incidents[3].pause_s == 5


@pytest.mark.variant
def test_a_cold_start_ends_with_the_same_bits(tmp_path: Path, expected: tuple[str, list[str]]) -> None:
    job = minimal(tmp_path, "--no-warm")
    job.until_step(20)
    job.kill_rank(0)
    same(job, expected)
    assert job.faults()[0].launch == "cold: warm starts are switched off"


@pytest.mark.variant
def test_killed_while_it_starts(tmp_path: Path, expected: tuple[str, list[str]]) -> None:
    job = minimal(tmp_path)
    job.kill_rank(1)
    same(job, expected)


def test_everything_killed_goes_on_from_disk(tmp_path: Path, expected: tuple[str, list[str]]) -> None:
    job = minimal(tmp_path)
    job.until_said("step 20 is on disk")
    job.kill_everything()
    job.start()
    same(job, expected)
    (incident,) = job.faults()
    assert incident.cause == "agent_restarted"
    assert incident.resume_step is not None
    assert incident.resume_step >= 20
    assert "from disk" in job.said()


@pytest.mark.variant
def test_what_the_ranks_have_started_from_is_not_retired(tmp_path: Path, expected: tuple[str, list[str]]) -> None:
    """One snapshot is to be kept; beside it there is the one that is known to be good, until the next start."""
    job = minimal(tmp_path, "--set", "snapshots.keep=1")
    job.until_said("step 20 is on disk")
    job.kill_everything()
    job.start()
    same(job, expected)
    (started,) = [incident.resume_step for incident in job.faults()]
    kept = sorted(int(path.parent.name[:10]) for path in (job.directory / "snapshots").glob("*/COMMIT"))
    assert kept == [started, STEPS]


@pytest.mark.variant
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["dp2", *(pytest.param(layout, marks=pytest.mark.variant) for layout in ("tp2", "pp2", "ep2"))]
)
def test_megatron_core_killed_and_poisoned(layout: str, tmp_path: Path) -> None:
    arguments = ["--steps", "40", *LAYOUTS[layout]]
    digest, lines = undisturbed(GPT, *arguments)
    faults = ["--step-delay", "0.02", "--poison-gradient", "8:1", "--poison-marker", str(tmp_path)]
    job = Job(tmp_path, ["--nproc-per-node", "2", str(GATED), str(GPT), *arguments, *faults], "--durable-every", "20")
    job.until_said("the warm process is ready")
    job.until_step(25)
    job.kill_rank(0)
    assert job.finish() == 0, job.said()
    assert digest_of(job.printed()) == digest
    assert step_lines(job.printed()) == lines
    assert [(i.cause, i.rung) for i in job.faults()] == [("non_finite", 1), ("rank_killed", 2)]
    assert all(i.lost_steps <= 2 for i in job.faults())
    assert job.faults()[1].launch == "warm"


@pytest.mark.variant
def test_dtensors_sharded_by_fsdp(tmp_path: Path) -> None:
    expected = undisturbed(FSDP, "--steps", "60")
    job = Job(tmp_path, ["--nproc-per-node", "2", str(GATED), str(FSDP), "--steps", "60"])
    job.until_step(20)
    job.kill_rank(1)
    same(job, expected)


@pytest.mark.parametrize("bf16", some_of([False, True]))
def test_parameters_that_an_evaluation_has_left_gathered(bf16: bool, tmp_path: Path) -> None:
    """Step 12 ends with an evaluation: the NaN of step 13 goes back to behind it. The kill goes back to behind step 30."""
    words = ["--steps", "58", "--evaluate", "3", *(["--bf16"] if bf16 else [])]
    expected = undisturbed(FSDP, *words)
    words += ["--poison", "12", "--marker", str(tmp_path / "poisoned")]
    job = Job(tmp_path, ["--nproc-per-node", "2", str(GATED), str(FSDP), *words], GATE_AFTER="33")
    job.until(lambda now: now.min_step >= 31 and bool(job.faults()) and all(now.pids))
    time.sleep(1)  # until the snapshot of step 30 is sealed
    job.kill_rank(1)
    assert job.finish() == 0, job.said()
    assert (digest_of(job.printed()), step_lines(job.printed())) == expected
    assert [(i.cause, i.rung, i.resume_step) for i in job.faults()] == [("non_finite", 1, 12), ("rank_killed", 2, 30)]


@pytest.mark.variant
def test_a_script_that_has_been_edited_meanwhile_starts_cold(tmp_path: Path, expected: tuple[str, list[str]]) -> None:
    script = tmp_path / "gated.py"
    script.write_text(GATED.read_text())
    command = ["--nproc-per-node", "2", str(script), str(MINIMAL), "--steps", str(STEPS), "--step-delay", "0.02"]
    job = Job(tmp_path, command)
    job.until_said("the warm process is ready")
    script.write_text(f"print('edited')\n{GATED.read_text()}")
    job.kill_rank(1)
    same(job, expected)
    assert job.faults()[0].launch == f"cold: {script} has changed, or is gone, since the warm process has run it"
    assert job.printed().count("edited") == 2
