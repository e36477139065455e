"""A MUSA device, as far as a stand-in for torch_musa goes: poisoned and killed, forked, the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..harness import GATED, ROOT, Job, digest_of, environment, step_lines

MUSA = ROOT / "tests" / "musa"
STEPS = 60


def on_musa() -> str:
    return os.pathsep.join(filter(None, [str(MUSA / "standin"), os.environ.get("PYTHONPATH")]))


def under_torchrun(script: list[str], path: str) -> subprocess.CompletedProcess[str]:
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", *script]
    return subprocess.run(command, env=environment(PYTHONPATH=path), text=True, capture_output=True, timeout=300)


def test_a_musa_device_poisoned_and_killed(tmp_path: Path) -> None:
    path = on_musa()
    script = [str(MUSA / "train.py"), str(STEPS), str(tmp_path / "marker")]
    plain = under_torchrun(script, path)
    job = Job(tmp_path, ["--nproc-per-node", "2", str(GATED), *script], PYTHONPATH=path, POISON="once")
    job.until_said("the warm process is ready")
    job.kill_rank(1)
    assert job.finish() == 0, job.said()
    assert digest_of(job.printed()) == digest_of(plain.stdout), plain.stderr[-3000:]
    assert step_lines(job.printed()) == step_lines(plain.stdout)
    rewind, restart = sorted(job.faults(), key=lambda incident: incident.rung)
    assert (rewind.rung, restart.rung, restart.launch) == (1, 2, "warm")


def test_a_restarted_rank_registers_its_slot_before_the_session_and_the_bits_are_equal(tmp_path: Path) -> None:
    path = on_musa()
    script = [str(MUSA / "train.py"), str(STEPS), str(tmp_path / "marker")]
    plain = under_torchrun(script, path)
    job = Job(tmp_path, ["--nproc-per-node", "2", *script], PYTHONPATH=path, HOLDS="20")
    job.until_said("the warm process is ready")
    job.kill_rank(1)
    assert job.finish() == 0, job.said()
    assert [incident.launch for incident in job.faults()] == ["warm"]
    told = sorted(line for line in job.printed().splitlines() if line.endswith("slots prepared"))
    assert told == [f"rank {rank} finds {slots} slots prepared" for rank in range(2) for slots in range(2)]
    assert digest_of(job.printed()) == digest_of(plain.stdout), plain.stderr[-3000:]


@pytest.mark.timing
def test_a_rank_whose_kernel_never_ends_is_named_although_it_spins(tmp_path: Path) -> None:
    """It polls its device, so its processor is busy. `hang.busy_s` would leave it alone for half an hour."""
    script = [str(MUSA / "train.py"), "20", str(tmp_path / "marker")]
    quick = ["--set", "hang.floor_s=3", "--set", "hang.confirm_s=1", "--set", "hang.warmup_steps=1"]
    job = Job(tmp_path, ["--nproc-per-node", "2", *script], *quick, PYTHONPATH=on_musa(), ENDLESS="once")
    assert job.finish() == 0, job.said()
    (incident,) = job.faults()
    assert (incident.cause, incident.rung) == ("rank_hung", 2)
    assert incident.summary.startswith("rank 1 on ")


@pytest.mark.variant
def test_the_last_snapshot_waits_for_two_whose_copies_outlast_the_loop(tmp_path: Path) -> None:
    """Of three slots, one holds the newest snapshot, and two hold those that are under way."""
    script = [str(MUSA / "train.py"), "7", str(tmp_path / "marker")]
    slow = {"MUSA_STANDIN_COPY_DELAY_S": "0.3", "EVALUATES_S": "4"}
    job = Job(tmp_path, ["--nproc-per-node", "2", *script], PYTHONPATH=on_musa(), **slow)
    assert job.finish() == 0, job.said()
    assert "step 7 is on disk" in job.said()


@pytest.mark.variant
@pytest.mark.timeout(1200)
def test_the_proof_that_a_user_runs_on_a_device(tmp_path: Path) -> None:
    """On the stand-in: two ranks, each case."""
    command = [str(ROOT / "scripts" / "prove-on-device"), "--device", "musa", "--ranks", "2"]
    there = os.pathsep.join([on_musa(), *sys.path])
    done = subprocess.run(
        command, env=environment(PYTHONPATH=there, PYTHON=sys.executable), text=True, capture_output=True, timeout=1150
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    rows = [line.split(" | ")[:2] for line in done.stdout.splitlines()[4:]]
    assert rows == [[f"| {case}", "equal"] for case in ("repeat", "wrapped", "kill", "nan", "hang", "agent")]
