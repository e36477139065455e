"""Ctrl-C, SIGTERM and the normal end: everything ends in order, nothing that was asked for is lost."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from mt_resilient.agent.cli import explain
from mt_resilient.agent.run_directory import RunDirectory
from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.checkpoint.backend.paths import Attempt
from mt_resilient.checkpoint.durable import catalog
from mt_resilient.resilience.errors import ScriptError
from mt_resilient.resilience.model.state_machine import Phase

from ..harness import GATED, MINIMAL, ROOT, Job, cli, digest_of, undisturbed

STEPS = 120
TAILS = Path(__file__).with_name("tails.py")


def minimal(place: Path, *options: str) -> Job:
    command = ["--nproc-per-node", "2", str(GATED), str(MINIMAL), "--steps", str(STEPS), "--step-delay", "0.02"]
    return Job(place, command, "--durable-every", "1000", *options)


def newest_on_disk(job: Job) -> int:
    attempt = Attempt.parse(catalog.committed(Files(job.directory))[0].name)
    assert attempt
    return attempt.stamp.step


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.variant), (signal.SIGTERM, 143)]
)
def test_a_signal_ends_everything_in_order(number: int, code: int, tmp_path: Path) -> None:
    job = minimal(tmp_path)
    job.until_step(3)
    job.agent.send_signal(number)
    job.until_said("ending the job")
    assert job.finish() == code
    assert f'File "{ROOT}/agent' not in job.said(), (
        "a traceback of the agent, which prints none; ranks do, as under torchrun"
    )
    assert not (job.directory / "endpoint").exists()


INTERRUPTED = """
import atexit, time
import torch
from mt_resilient import Session

atexit.register(print, "exit handler", flush=True)
model = torch.nn.Linear(2, 2)
try:
    for step in Session(model=model).steps(9999):
        time.sleep(0.02)
        print("step", step, flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
finally:
    print("put away", flush=True)
"""


@pytest.mark.variant
def test_ranks_of_a_session_hear_ctrl_c_as_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    job = Job(tmp_path, ["--nproc-per-node", "2", str(script)])
    job.until_step(3)
    job.agent.send_signal(signal.SIGINT)
    assert job.finish(30) == 130
    for said in ("interrupted", "put away", "exit handler"):
        assert job.printed().count(said) == 2, said
    assert job.faults() == []


@pytest.mark.parametrize(
    ("number", "asked"),
    [
        pytest.param(signal.SIGINT, ["--last-snapshot"], id="asked for", marks=pytest.mark.variant),
        pytest.param(signal.SIGUSR1, [], id="preempted"),
    ],
)
def test_a_last_snapshot_and_then_on_to_the_same_bits(number: int, asked: list[str], tmp_path: Path) -> None:
    expected, _ = undisturbed(MINIMAL, "--steps", str(STEPS))
    job = minimal(tmp_path, *asked)
    reached = job.until_step(5).max_step
    job.agent.send_signal(number)
    job.until_said("taking a last snapshot")
    job.until(
        lambda _: bool((world := explain.look(RunDirectory(job.directory))) and world.present.phase is not Phase.RUN)
    )
    assert job.finish() == 128 + number
    assert reached < newest_on_disk(job) < STEPS, "the snapshot was taken at a boundary after the signal"
    job.start()
    assert job.finish() == 0, job.said()
    assert digest_of(job.printed()) == expected
    assert not job.faults(), "being stopped and started by hand is no incident"


@pytest.mark.variant
def test_asked_twice_it_leaves_at_once(tmp_path: Path) -> None:
    job = minimal(tmp_path, "--last-snapshot")
    job.until_step(3)
    job.agent.send_signal(signal.SIGINT)
    time.sleep(0.02)
    job.agent.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert job.finish(30) == 130
    assert time.monotonic() - began < 10


@pytest.mark.variant
def test_a_signal_while_ranks_still_start(tmp_path: Path) -> None:
    job = minimal(tmp_path, "--last-snapshot")
    job.until(lambda now: now.generation == 1)
    job.agent.send_signal(signal.SIGINT)
    assert job.finish(30) == 130


@pytest.mark.variant
def test_the_last_step_is_on_disk_and_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    command = ["--nproc-per-node", "2", str(MINIMAL), "--steps", "5"]
    job = Job(tmp_path, command, "--durable-every", "1000")
    assert job.finish() == 0, job.said()
    assert newest_on_disk(job) == 5
    job.start()
    assert job.finish() == 2
    assert "is finished; name another directory with --run-dir" in job.said()
    done = cli("status", "--run-dir", str(job.directory))
    assert (done.returncode, "the training is over" in done.stdout) == (0, True)


@pytest.mark.variant
def test_a_script_that_fails_behind_its_loop_is_tried_twice(tmp_path: Path) -> None:
    job = Job(tmp_path, ["--nproc-per-node", "2", str(TAILS), "raises"])
    assert job.agent.wait(120) == ScriptError.exit_code, job.said()
    assert "failed 2 times in the same way after its loop" in job.said()
    assert "no such bucket" in job.said()


@pytest.mark.variant
@pytest.mark.parametrize("whom", [pytest.param("rank", marks=pytest.mark.variant), "agent"])
def test_what_only_the_body_makes_is_there_behind_the_loop_of_a_later_life(whom: str, tmp_path: Path) -> None:
    """A life that begins at the last step does not run the body: where the script fails behind it, the next begins earlier."""
    job = Job(tmp_path, ["--nproc-per-node", "2", str(TAILS), "uses", "5"], "--durable-every", "5")
    job.until(lambda now: job.printed().count("behind the loop") == 2)
    job.until_said("step 20 is on disk")
    if whom == "rank":
        job.kill_rank(1)
    else:
        job.agent.kill()
        job.agent.wait()
        job.start()
    assert job.finish(120) == 0, job.said()
    assert job.printed().count("the last loss:") == 2
    assert "from step 20 the loop's body did not run" in job.said()


@pytest.mark.variant
def test_ranks_that_do_not_do_the_same_number_of_steps_are_told(tmp_path: Path) -> None:
    """As with torch.distributed's Join. They waited for each other until the hang was found."""
    job = Job(tmp_path, ["--nproc-per-node", "2", str(TAILS), "uneven", "60"])
    job.until_said("rank 1 has ended its loop after 15 steps, and this rank has more")
    job.kill_everything()


@pytest.mark.variant
def test_a_loop_that_was_left_by_a_break_is_not_waited_for(tmp_path: Path) -> None:
    """All ranks are silent for longer than a step may be."""
    impatient = ["--set", "hang.floor_s=2", "--set", "hang.confirm_s=0.5", "--set", "hang.idle_s=1"]
    job = Job(tmp_path, ["--nproc-per-node", "2", str(TAILS), "breaks", "10"], *impatient)
    assert job.finish(120) == 0, job.said()
    assert job.faults() == []
